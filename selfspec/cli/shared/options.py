"""The options that commands share, as records, and the decorator that unfolds them.

typer reads options off a function's parameters. `unfolds` lets a command take whole records
instead: each of their fields becomes an option, and the command gets the filled records.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from typer import Option

from selfspec.config import SpecConfig

_MEMORY = "Devices, memory and what is kept"
_DRAFTING = "For experts: how drafts are made (this changes the speed only)"
_KEYWORD, _NEEDED = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty

MaxNewTokens = Annotated[
    int, Option(min=1, metavar="NUMBER", help="Stop after this number of new tokens.")
]

DeviceName = Annotated[
    str,
    Option(
        help="cpu, cuda, cuda:1 and so on. auto: a GPU if there is one, else the CPU.",
        rich_help_panel=_MEMORY,
    ),
]

DtypeName = Annotated[
    str,
    Option(
        help="float32, bfloat16 or float16. auto: as the model was saved. In half precision the "
        "text may differ from that of plain generate() where two tokens are almost equally "
        "likely."
    ),
]

CacheFolder = Annotated[
    str | None,
    Option(
        "--cache",
        help="Start with this cache, a file or a Hub id. 'selfspec cache build' makes one. It "
        "must be built for the model's tokenizer.",
        rich_help_panel=_MEMORY,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where and in what precision."""

    model: Annotated[
        str | None,
        Option(
            help="Folder or Hub id of a causal language model. Default: a small model that comes "
            "with selfspec and continues Python code.",
        ),
    ] = None
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"

    @property
    def title(self) -> str:
        """What the model is called while it is loaded."""
        return self.model or "the embedded model"


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """The same for commands that run the model for a user, and within what memory."""

    max_memory: Annotated[
        str | None,
        Option(
            help="Memory for the model and a draft model, such as 2GB, 500MB or 25% of what the "
            "model takes. Layers that do not fit are read from disk in each step. Default: no "
            "limit.",
            rich_help_panel=_MEMORY,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunOptions):
    """The same with where drafts come from beside the text itself, and what is kept of it."""

    cache: CacheFolder = None
    remember: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Start with what earlier runs learned, and add what this run learns. The file "
            "holds pieces of texts, belongs to the model's tokenizer, and only you can read it. "
            "Default: keep nothing.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Folder or Hub id of a small model with the same tokenizer. It drafts too where "
            "that pays. Default: none.",
            rich_help_panel=_MEMORY,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: Annotated[
        float | None,
        Option(
            min=0.0,
            metavar="NUMBER",
            help="0: always the likeliest token. Higher: more varied text. Default: what the "
            "model's own generation config says.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            help="For sampling: the same seed gives the same text. Default: a new one each time.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WriteOptions(Sampling, DraftOptions):
    """All that decides which text is written, and what is drafted for it."""


# What each knob of `SpecConfig` does, in a line of a command's help.
_KNOBS = {
    "max_nodes": "The most nodes of a draft tree. 1 is plain decoding.",
    "budget": "measured: as many nodes as pay on this machine. fixed: as many as there are guesses "
    "for. threshold: only the likely ones. fitted: the shape that 'selfspec tune' put into the "
    "cache.",
    "max_depth": "The longest draft, in tokens. Less: broader trees.",
    "top_k": "Candidates kept for each token (this is not the top-k of sampling).",
    "depth_decay": "δ, a factor on the score for each deeper level. Lower: wide, shallow trees.",
    "width_decay": "α, a factor on the score for each rank among siblings. Lower: deep trees.",
    "threshold": "τ, the lowest score of a node. Higher: shorter drafts. 0: no limit.",
    "update_interval": "Steps for which a tree keeps its shape. More: cheaper, worse guesses.",
    "sources": "Sources of drafts, separated by commas. Empty: plain decoding.",
    "num_branches": "Rows of guesses that each forward computes beside the tree. 0: none.",
    "branch_length": "Tokens of such a row.",
    "learning": "session: learn from call to call. request: within a call. frozen: not at all.",
    "forward": "How the model is run. auto: captured graphs on CUDA, and packed weights on a CPU "
    "if they are faster. eager, packed or graph: this way, if possible.",
    "overlap": "On CUDA, update tables and KV while the CPU works, or do one after the other.",
    "strict": "Refuse a call that can't be drafted for, or decode it plainly and say why.",
}


def option(name: str, kind: Any, default: Any, **more: Any) -> inspect.Parameter:
    """A parameter that typer makes an option of."""
    annotation = Annotated[kind, Option(**more)]
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)


class Knobs(dict[str, Any]):
    """Every knob of `SpecConfig`, under its own name."""

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        """An option for each, with the same type and default. Sources are named with commas."""
        hints = {**get_type_hints(SpecConfig), "sources": str}
        defaults = {**dataclasses.asdict(SpecConfig()), "sources": ",".join(SpecConfig().sources)}
        return [
            option(name, hints[name], defaults[name], help=text, rich_help_panel=_DRAFTING)
            for name, text in _KNOBS.items()
        ]

    def config(self) -> SpecConfig:
        """The knobs, checked."""
        knobs = dict(self)
        if "sources" in knobs:
            names = (name.strip() for name in knobs["sources"].split(","))
            knobs["sources"] = tuple(name for name in names if name)
        return checked_config(**knobs)


def checked_config(**knobs: Any) -> SpecConfig:
    """A `SpecConfig`; what it says about old names is logged, so that the user sees it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", DeprecationWarning)
        config = SpecConfig.of(**knobs)
    for each in said:
        logging.getLogger("selfspec").warning("%s", each.message)
    return config


def unfolds(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each parameter that is a record by the record's options."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {
        name: hint
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint) or hasattr(hint, "options")
    }
    options = {name: _options(record) for name, record in records.items()}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        plain = [parameter.replace(annotation=hints[name], kind=_KEYWORD)]
        parameters += options.get(name, plain)

    def unfolded_command(**values: Any) -> None:
        filled = {
            name: record(**{each.name: values.pop(each.name) for each in options[name]})
            for name, record in records.items()
        }
        command(**filled, **values)

    functools.update_wrapper(unfolded_command, command)
    del unfolded_command.__wrapped__  # type: ignore[attr-defined]
    # typer wants parameters without a default first.
    parameters.sort(key=lambda p: p.default is not _NEEDED)
    unfolded_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    unfolded_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return unfolded_command


def _options(record: Any) -> list[inspect.Parameter]:
    if hasattr(record, "options"):
        return record.options()  # type: ignore[no-any-return]
    hints = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            each.name,
            _KEYWORD,
            default=_NEEDED if each.default is dataclasses.MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in dataclasses.fields(record)
    ]
