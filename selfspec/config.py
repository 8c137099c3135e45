"""`SpecConfig`: every knob of selfspec, named, typed, defaulted and validated.

Knows nothing of models, tensors or sources: only names and numbers. What a knob does is written
here alone: `--help` and the table in `docs/knobs.md` are made from the docstring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from selfspec.errors import AttachError, ConfigError, check_names
from selfspec.machine.memory import amount_in_bytes

MOST = 1 << 16  # Each knob that counts may be as large as this: no forward is as wide.
BUDGETS = ("measured", "fixed")
FORWARDS = ("auto", "eager", "graph")
LEARNING_SCOPES = ("session", "request", "frozen")
# Names of a draft model that is the model itself, with rounded weights.
ROUNDED = ("int4", "int8")
SOURCE_NAMES = ("lut", "lut2", "context", "answers", "near_misses", "common", "heads")
# Their names until 0.4, which are still understood.
OLD_SOURCE_NAMES = {"texts": "answers", "runners": "near_misses"}


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """How much to draft, from what, and how far the learning reaches.

    No knob changes the text that comes out: each trades the cost of a forward against the
    number of tokens that it yields.

    Args:
        max_nodes: The most nodes of a draft tree, its root included; 1 is plain decoding. This is
            also the width of a forward. Higher brings more tokens a step where wide forwards are
            cheap. Under a budget that is not measured, 8 to 16 suit a CPU.
        budget: How many nodes a step takes: "measured", as many as pay on this machine, or "fixed",
            all that there are guesses for. With "fixed" nothing depends on a clock.
        max_depth: The longest draft, in tokens. Higher takes a longer copied passage in one step.
            Lower makes broader trees.
        top_k: Candidates kept for each token in the look-up tables. It is also the most that a
            source may name for a node, and not the top_k of sampling.
        sources: Where drafts come from, by name; without any, and without sources of
            your own, all decoding is plain. "lut": what
            followed a token before. "lut2": what followed two tokens. "context": what this text
            contains already. "answers": what answers and the texts of a cache have said before.
            "near_misses": what the model nearly chose. "common": what it finds likely everywhere,
            where a text is sampled. "heads": what heads say that come with the
            model, if it has any.
        learning: How far what is learned reaches: "session", from call to call; "request", within a
            call; "frozen", nothing is learned. "request" keeps the tenants of a server apart.
        forward: How drafts are run: "auto", "eager" or "graph". "auto": captured graphs on CUDA
            where that can be, else as "eager": as `generate()` runs it. "graph" asks for captured
            graphs, and goes on eagerly if that can't be.
        kept_kv: Memory for keys and values of texts that were read: a size such as "2GB", a share
            of the free memory such as "25%", or 0. A prompt that begins like one of them goes on
            from there. None: in a server and for files of prompts, what running texts leave of
            their memory; nothing elsewhere.
        trust_hooks: Draft although code runs in the model that is no library's: hooks, wrapper
            modules, replaced functions or a model class of your own, or one that comes with the
            model's files. True is your word that it has no state, and that what it does to a token
            depends on no token that masks hide, nor on how many there are in a forward.

    >>> SpecConfig(max_nodes=0)
    Traceback (most recent call last):
    selfspec.errors.ConfigError: max_nodes must be >= 1 (got 0)
    """

    max_nodes: int = 64
    budget: str = "measured"
    max_depth: int = 64
    top_k: int = 8
    sources: tuple[str, ...] = SOURCE_NAMES
    learning: str = "session"
    forward: str = "auto"
    kept_kv: int | str | None = None
    trust_hooks: bool = False

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_depth", "top_k"):
            count = getattr(self, name)
            if type(count) is not int:
                raise ConfigError(f"{name} must be a whole number (got {count!r})")
            if count < 1:
                raise ConfigError(f"{name} must be >= 1 (got {count})")
            if count > MOST:
                raise ConfigError(f"{name} must be <= {MOST} (got more)")
        self._check_sources()
        for what, value, known in (
            ("budget", self.budget, BUDGETS),
            ("learning scope", self.learning, LEARNING_SCOPES),
            ("forward", self.forward, FORWARDS),
        ):
            check_names(what, [value], known)
        if self.kept_kv == "0":
            object.__setattr__(self, "kept_kv", 0)
        if self.kept_kv not in (None, 0) or isinstance(self.kept_kv, bool):
            share = amount_in_bytes(self.kept_kv, whole=100, name="kept_kv")
            if share > 100 and "%" in str(self.kept_kv):
                raise ConfigError(
                    f"kept_kv must be at most 100% of the free memory (got {self.kept_kv!r})"
                )
        if not isinstance(self.trust_hooks, bool):
            raise ConfigError(f"trust_hooks must be True or False (got {self.trust_hooks!r})")

    def get_text_config(self, *_args: Any, **_options: Any) -> NoReturn:
        # transformers asks this first of `assistant_model=`, which many try with a `SelfSpec`.
        raise AttachError(
            "assistant_model= must be a model (got a SelfSpec); call selfspec.attach(model) once, "
            "then generate(..., assistant=spec)"
        )

    @classmethod
    def of(cls, **knobs: Any) -> SpecConfig:
        return cls().changed(**knobs)

    def changed(self, **knobs: Any) -> SpecConfig:
        if "strict" in knobs:  # A knob until 0.4.
            raise ConfigError(
                "strict is no knob any more (got strict={!r}); leave it out, and look at "
                "spec.stats.disabled_reason after a call".format(knobs["strict"])
            )
        check_names("knob", knobs, [field.name for field in fields(self)])
        return replace(self, **knobs)

    def _check_sources(self) -> None:
        if isinstance(self.sources, str) or not isinstance(self.sources, Iterable):
            raise ConfigError(f"sources must be a list of names (got {self.sources!r})")
        object.__setattr__(self, "sources", tuple(map(_new_name, self.sources)))
        check_names("source", self.sources, SOURCE_NAMES)
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError(f"sources must not repeat a name (got {list(self.sources)})")


def _new_name(source: Any) -> Any:
    return OLD_SOURCE_NAMES.get(source, source) if isinstance(source, str) else source
