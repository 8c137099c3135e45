"""The options that commands share, as records. cyclopts makes options of their fields.

A field's text in `--help` is the string below it; what a knob does is written in `SpecConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number
from docstring_parser import parse

from selfspec.config import FORWARDS, LEARNING_SCOPES, SOURCE_NAMES, SpecConfig

TINY = Path(__file__).parents[1] / "models" / "tiny"

GENERAL = Group("Options", sort_key=0)  # The arguments of a command too.
_MODEL = Group("Model, memory and what is kept", sort_key=1)
_DRAFTING = Group("Drafting (for experts, see docs/knobs.md)", sort_key=2)

Model = Annotated[str, Parameter(help="Folder or Hub id of a language model.")]
# A flag such as --full has no --no-full.
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Verbose = Annotated[bool, Parameter(name=("--verbose", "-v"), negative=(), show_default=False)]


def _whole(_type: Any, tokens: Any) -> int:
    value = tokens[0].value
    try:
        return int(value)
    except ValueError:  # cyclopts would take 1.5 as 2.
        raise ValueError(f"it must be a whole number (got {value!r})") from None


def whole_number(least: int, *, below: int | None = None) -> Parameter:
    return Parameter(converter=_whole, validator=Number(gte=least, lt=below))


Positive = Annotated[int, whole_number(1)]
NotNegative = Annotated[int, whole_number(0)]
Temperature = Annotated[float, Parameter(validator=Number(gte=0, lt=math.inf))]
_Place = Annotated[str, Parameter(group=_MODEL, show_default=False)]
_Kept = Annotated[str | None, Parameter(group=_MODEL)]
_Seed = Annotated[int, whole_number(0, below=2**63)]
_Bits = Literal["int8", "int4"] | None
_Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, where and in what precision."""

    model: Annotated[str | None, Parameter(parse=False)] = None  # None: the embedded one
    device: _Place = "auto"
    """cpu, cuda, cuda:1. Default: a GPU if there is one."""
    dtype: Annotated[_Dtype, Parameter(group=_MODEL, show_choices=False, show_default=False)] = (
        "auto"
    )
    """float32: same text; bfloat16: often not. Default: saved."""
    verbose: Verbose = False
    """Also say what is prepared, and how long it takes."""

    @property
    def source(self) -> str:
        """Where the model is: a folder or a Hub id."""
        return self.model or str(TINY)

    @property
    def title(self) -> str:
        return self.model or "the embedded model"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions):
    """The same with memory, weights and what drafts, for commands that run the model."""

    max_memory: _Kept = None
    """Memory for weights: 2GB, 25%. The rest stays on disk."""
    weights: Annotated[_Bits, Parameter(group=_MODEL, show_choices=False)] = None
    """int8, int4: rounded to 8 or 4 bits, which is another text."""
    cache: _Kept = None
    """A cache of 'selfspec cache build': file or Hub id."""
    draft_model: _Kept = None
    """A small model that drafts too; int4 or int8: the model itself, rounded."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LearnOptions(RunOptions):
    """The same with a file that is kept for later runs."""

    remember: _Kept = None
    """Start from, and add to, this file: pieces of texts."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WriteOptions(LearnOptions):
    """The same with what decides which text is written."""

    temperature: Temperature | None = None
    """0: the likeliest token. Default: the model's own."""
    seed: _Seed | None = None
    """Same seed, same text. Default: a new one each time."""
    max_new_tokens: Positive = 512
    """The most new tokens of an answer."""


def knob_texts() -> dict[str, str]:
    """A text on each knob of `SpecConfig`, by name, from the docstring there."""
    knobs = parse(SpecConfig.__doc__ or "").params
    return {knob.arg_name: " ".join((knob.description or "").split()) for knob in knobs}


_TEXTS = knob_texts()


def _names(_type: Any, tokens: Any) -> tuple[str, ...]:
    names = (name.strip() for token in tokens for name in token.value.split(","))
    return tuple(name for name in names if name)


def _knob(name: str, values: Sequence[str] = (), **how: Any) -> Parameter:
    """An option with the first words that `SpecConfig` says about the knob."""
    text = re.split(r"[.:;] ", _TEXTS[name])[0].rstrip(".")
    listed = f": {', '.join(values)}" if values else ""
    return Parameter(
        help=f"{text}{listed}.",
        group=_DRAFTING,
        negative=(),
        show_default=False,
        show_choices=False,
        **how,
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The knobs that a command takes, as in `SpecConfig`; the others are for comparisons."""

    max_nodes: Annotated[int, _knob("max_nodes", converter=_whole)] = SpecConfig.max_nodes
    budget: Annotated[Literal["measured", "fixed"], _knob("budget", ("measured", "fixed"))] = (
        "measured"
    )
    sources: Annotated[
        tuple[str, ...], _knob("sources", SOURCE_NAMES, converter=_names, n_tokens=1)
    ] = SpecConfig.sources
    learning: Annotated[str, _knob("learning", LEARNING_SCOPES)] = SpecConfig.learning
    forward: Annotated[str, _knob("forward", FORWARDS)] = SpecConfig.forward
    kept_kv: Annotated[str | None, _knob("kept_kv")] = None

    def config(self) -> SpecConfig:
        return SpecConfig(**vars(self))
