"""What a run was asked for: every option of `python -m eval run`, checked."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eval.benches.questions import Slice
from eval.errors import EvalError
from eval.methods.studies import Variant
from eval.options import check_at_least, drafting_knobs
from eval.runs.environment import short_name

# What does not decide what is measured, or is said in other words.
_UNSAID = {"output", "questions", "threads", "slice"}
_NAMED = ("bench", "assistant_model", "cache", "tree")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options. Whoever has equal `settings()` measures the same."""

    bench: str
    output: Path
    methods: tuple[str, ...]
    model: str | None = None
    questions: Path | None = None
    assistant_model: str | None = None
    shape: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    turns: int | None = None
    rounds: int = 1
    prompt_format: str = "auto"
    cache: str | None = None
    tree: str | None = None
    weights: str | None = None
    openvino: tuple[str, ...] | None = None
    datastore: Path | None = None
    warm_up: int = 0
    max_prompt_tokens: int | None = None
    slice: Slice = field(default_factory=Slice)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=dict)  # methods by names of their own
    study: str | None = None  # that the variants are of

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_new_tokens", "turns", "rounds", "threads")
        check_at_least(self, 0, "warm_up", "temperature")
        check_at_least(self.slice, 1, "limit", "every")
        if not 0 <= self.slice.offset < self.slice.every:
            rule = f"0 to --every - 1, which is {self.slice.every - 1}"
            raise EvalError(f"--offset must be {rule} (got {self.slice.offset})")
        if self.cache is not None and self.warm_up:
            raise EvalError(
                f"--warm-up must be 0 with --cache (got {self.warm_up}): a prebuilt state and a "
                "warmed one are two runs"
            )
        if len(set(self.methods)) < len(self.methods):
            raise EvalError(f"--methods must not repeat a name (got {','.join(self.methods)})")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Asked:
        """From the options of a command that are called alike."""
        names = [option.name for option in fields(cls) if hasattr(options, option.name)]
        slice_ = Slice(*(getattr(options, name) for name in Slice._fields))
        given = {name: getattr(options, name) for name in names}
        return cls(**{**given, "slice": slice_, "knobs": drafting_knobs(options)})

    def variant(self, name: str) -> Variant:
        """The method of that name, and the knobs that it has besides those of all."""
        return self.variants.get(name, Variant(name, {}))

    @property
    def compared_caches(self) -> list[str]:
        """Those that a study's variants start with."""
        return [variant.cache for variant in self.variants.values() if variant.cache is not None]

    @property
    def state(self) -> str:
        """What drafters know at the first question, in a word and its measure."""
        if self.cache is not None:
            return f"prebuilt ({short_name(self.cache)})"
        if self.compared_caches:
            return "prebuilt where a method names a cache, else cold"
        return f"warmed (on {self.warm_up} other questions)" if self.warm_up else "cold"

    def settings(self) -> dict[str, Any]:
        """All that decides what is measured, as JSON has it."""
        names = {option.name for option in fields(self)} - _UNSAID
        return {
            **{name: getattr(self, name) for name in sorted(names)},
            **{name: short_name(getattr(self, name)) for name in _NAMED},
            **self.slice._asdict(),
            "model": short_name(self.model) or "tiny",
            "datastore": self.datastore and short_name(str(self.datastore)),
            "openvino": self.openvino and short_name(self.openvino[1]),
            "methods": list(self.methods),
            "state": self.state,
            "knobs": dict(self.knobs),
            "variants": {name: _as_json(variant) for name, variant in self.variants.items()},
        }


def _as_json(variant: Variant) -> dict[str, Any]:
    return {**variant._asdict(), "cache": short_name(variant.cache)}
