"""The options that commands share, as records. cyclopts makes an option of each field.

A field's text in `--help` is the string below it. What knobs do is written in `SpecConfig`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt
from docstring_parser import parse

from selfspec.config import SpecConfig

_MEMORY = Group("Devices, memory and what is kept", sort_key=1)
_DRAFTING = Group("For experts (docs/knobs.md has more of these)", sort_key=2)
# What `--help` shows, in a sentence each; the other knobs are for comparisons, or for very few.
_SHOWN_KNOBS = ("max_nodes", "budget", "max_depth", "sources", "learning", "forward", "strict")

Model = Annotated[str, Parameter(help="Folder or Hub id of a causal language model.")]
# There is no --no-full beside --full.
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Verbose = Annotated[bool, Parameter(name=("--verbose", "-v"), negative=(), show_default=False)]
_Kept = Annotated[str | None, Parameter(group=_MEMORY)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where and in what precision."""

    model: Annotated[str | None, Parameter(parse=False)] = None  # None: the embedded one
    device: Annotated[str, Parameter(group=_MEMORY)] = "auto"
    """cpu, cuda, cuda:1 and so on. auto: a GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16 or float16. auto: as the model was saved."""
    verbose: Verbose = False
    """Also say on stderr what is prepared, and how long it takes."""

    @property
    def title(self) -> str:
        """What the model is called while it is loaded."""
        return self.model or "the embedded model"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """The same for commands that run the model for a user, within what memory, and from what."""

    max_memory: _Kept = None
    """Memory for the weights, such as 2GB or 25%. Layers that do not fit are read from disk in each
    step."""
    cache: _Kept = None
    """Start with this cache of 'selfspec cache build': a file or a Hub id."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunOptions):
    """The same with a draft model, and with what is kept for later runs."""

    remember: _Kept = None
    """Start with what earlier runs left in this file, and add what this run learns. It holds
    pieces of texts."""
    draft_model: _Kept = None
    """A small model with the same tokenizer, which drafts too where that pays."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: NonNegativeFloat | None = None
    """0: always the likeliest token. Default: as the model's own config says."""
    seed: int | None = None
    """The same seed gives the same text. Default: a new one each time."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WriteOptions(Sampling, DraftOptions):
    """All that decides which text is written, and what is drafted for it."""

    max_new_tokens: PositiveInt = 256
    """Stop after this number of new tokens."""


def knob_texts() -> dict[str, str]:
    """What each knob of `SpecConfig` does, by its name, from the docstring there."""
    found = parse(SpecConfig.__doc__ or "").params
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def _names(_type: Any, tokens: Any) -> tuple[str, ...]:
    """Names that are separated by commas."""
    names = (name.strip() for token in tokens for name in token.value.split(","))
    return tuple(name for name in names if name)


def _option_of_knob(name: str, kind: Any, text: str) -> Any:
    is_list = name == "sources"
    return Annotated[
        kind,
        Parameter(
            help=text.partition(". ")[0],
            group=_DRAFTING,
            show=name in _SHOWN_KNOBS,
            negative=None if kind is bool else (),
            converter=_names if is_list else None,
            n_tokens=1 if is_list else None,
            show_default=",".join if is_list else kind is not bool,
        ),
    ]


def record(name: str, options: Iterable[tuple[str, Any, Any]], base: type) -> Any:
    """A record with an option for each name, kind and default."""
    fields_of_it = [(option, kind, field(default=default)) for option, kind, default in options]
    made = make_dataclass(
        name,
        fields_of_it,
        bases=(base,),
        namespace={"__module__": __name__},  # cyclopts takes a class of `types` for a built-in one.
        frozen=True,
        kw_only=True,
    )
    return Parameter(name="*")(made)


class _Checked:
    def config(self) -> SpecConfig:
        """The knobs, checked."""
        return SpecConfig(**vars(self))


if TYPE_CHECKING:
    Knobs = _Checked
else:
    _hints, _texts = get_type_hints(SpecConfig), knob_texts()
    # Every knob under its own name, with the same type and default.
    Knobs = record(
        "Knobs",
        [
            (name, _option_of_knob(name, _hints[name], _texts[name]), default)
            for name, default in vars(SpecConfig()).items()
        ],
        _Checked,
    )
