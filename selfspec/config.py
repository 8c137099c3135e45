"""`SpecConfig`: every knob of selfspec, named, typed, defaulted and validated.

Knows nothing of models, tensors or sources: only names and numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from selfspec.errors import ConfigError, unknown_name

BUDGETS = ("measured", "fixed", "threshold", "fitted")
FORWARDS = ("auto", "eager", "packed", "graph")
LEARNING_SCOPES = ("session", "request", "frozen")
SOURCE_NAMES = ("lut", "lut2", "context", "corpus", "runners")


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """How much to draft, from what, and how far the learning reaches.

    No knob changes the text that comes out: each trades the cost of a forward against the
    number of tokens that it yields.

    Args:
        max_nodes: The most nodes of the draft tree, its root included, and so the width of a
            forward. Higher: more tokens a step, and a dearer step. 1 is plain decoding. Under a
            budget that is not measured, 8 to 16 suit a CPU.
        budget: How many of `max_nodes` a step takes. ``"measured"``: as many as bring the most
            tokens a second, by what a forward of each width costs on this machine and by how
            likely each guess is. The cost is learned from the steps themselves, and kept in the
            user's cache folder. ``"fixed"``: all that there are guesses for. ``"threshold"``: those
            whose chance is above EdgeLLM's threshold, which falls while drafts are right and rises
            where they are not. ``"fitted"``: the places of the one tree that ``selfspec tune`` put
            into the loaded cache; no step searches.
        max_depth: The deepest draft, in tokens beyond the root. Higher: long copied spans are
            taken in one step. Lower: the tree spends its nodes on breadth.
        top_k: Candidates kept for each token in the LUTs, and the most that a source names for a
            node. Higher: rarer continuations have a chance, and the LUTs grow in memory. 1 drafts
            chains.
        depth_decay: δ in (0, 1], multiplied in once for each level below the first. Lower: wider
            and shallower trees. 1 trusts the probabilities as they are.
        width_decay: α in (0, 1], multiplied in once for each rank below the first among siblings.
            Lower: narrower and deeper trees. 1 trusts the probabilities as they are.
        threshold: τ in [0, 1). A node below the first level with a lower score is discarded.
            Higher: fewer wasted nodes, and shorter drafts. 0 lets only the budget stop the growth.
        update_interval: Steps for which the shape of a tree is kept and only refilled with new
            tokens. Higher: cheaper drafting. 1 grows every tree anew and guesses best.
        sources: Where drafts come from: ``"lut"``, what followed a token before; ``"lut2"``, what
            followed two tokens; ``"context"``, what this request has said already; ``"corpus"``,
            the n-grams of a loaded cache, nothing without one; ``"runners"``, what the model
            nearly said. Fewer: less work on the CPU. None at all is plain decoding.
        num_branches: Self-Draft's branches: rows of guesses that ride along in a forward and fill
            the context with what the model would say next; under a measured budget only where
            they bring more than their time would otherwise. Higher: more n-grams, and a wider
            forward by as many times `branch_length`. 0: none; the paper's choice is 6.
        branch_length: Tokens of a branch, 1 or more. Higher: longer n-grams, wider forwards.
        learning: How far what is learned reaches. ``"session"``: from call to call of one
            `SelfSpec`. ``"request"``: each call starts from what was there before and leaves no
            trace, which keeps tenants of a server apart. ``"frozen"``: nothing is learned.
        forward: How the model is run over drafts. ``"auto"``: as captured graphs on CUDA; on a CPU
            from packed weights where a short trial shows that to be faster, as soon as they would
            have saved the time that it takes to make them, under a measured budget, and if the
            copies take no more than a quarter of the free memory; else as stock does. ``"eager"``:
            as stock does; nothing is
            kept from call to call. ``"packed"``: from packed weights at once, however much memory
            they take. They are second copies, laid out as the CPU's math library wants them, and
            live as long as a `SelfSpec` that used them. ``"graph"``: as captured graphs, each made
            on first use and kept with fixed KV slots for the next calls. Where a way can't be had
            the call goes on eagerly, and ``stats.eager_reason`` says why. A captured forward may be
            wider than its tree: 1, 2, 4, … 64, or a multiple of 64.
        overlap: True lets a CUDA device look up what is learned from a forward while the CPU
            reads which drafts were right, and move their KV while the CPU learns. The next draft
            waits for both. False does one after the other. What is learned is the same; without
            CUDA there is no difference.
        strict: True refuses a call that can't be drafted for, before the first forward. False
            decodes it plainly and says why in ``stats.disabled_reason``. With a `forward` other
            than ``"auto"`` and ``"eager"``, True refuses to go on eagerly, too.

    >>> SpecConfig(max_nodes=0)
    Traceback (most recent call last):
    selfspec.errors.ConfigError: max_nodes must be >= 1 (got 0)
    """

    max_nodes: int = 64
    budget: str = "measured"
    max_depth: int = 32
    top_k: int = 8
    depth_decay: float = 1.0
    width_decay: float = 1.0
    threshold: float = 0.0
    update_interval: int = 1
    sources: tuple[str, ...] = SOURCE_NAMES
    num_branches: int = 0
    branch_length: int = 6
    learning: str = "session"
    forward: str = "auto"
    overlap: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_depth", "top_k", "update_interval", "branch_length"):
            self._check_count(name)
        self._check_count("num_branches", least=0)
        for name in ("depth_decay", "width_decay"):
            self._check_real(name, 0 < self._real(name) <= 1, "in (0, 1]")
        self._check_real("threshold", 0 <= self._real("threshold") < 1, "in [0, 1)")
        self._check_sources()
        if self.budget not in BUDGETS:
            raise ConfigError(unknown_name("budget", str(self.budget), BUDGETS))
        if self.learning not in LEARNING_SCOPES:
            raise ConfigError(unknown_name("learning scope", str(self.learning), LEARNING_SCOPES))
        if self.forward not in FORWARDS:
            raise ConfigError(unknown_name("forward", str(self.forward), FORWARDS))
        for name in ("overlap", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False (got {getattr(self, name)!r})")

    @classmethod
    def of(cls, **knobs: Any) -> SpecConfig:
        """Builds a config from keywords; an unknown one is answered with the nearest name."""
        cls._check_names(knobs)
        return cls(**knobs)

    def changed(self, **knobs: Any) -> SpecConfig:
        """A copy with some knobs set anew, checked like the first one."""
        self._check_names(knobs)
        return replace(self, **knobs)

    @classmethod
    def _check_names(cls, knobs: dict[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for name in knobs:
            if name not in known:
                raise ConfigError(unknown_name("knob", name, known))

    def _check_count(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number (got {value!r})")
        if value < least:
            raise ConfigError(f"{name} must be >= {least} (got {value})")

    def _real(self, name: str) -> float:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} must be a number (got {value!r})")
        return float(value)

    def _check_real(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name} must be {rule} (got {getattr(self, name)!r})")

    def _check_sources(self) -> None:
        if isinstance(self.sources, str) or not isinstance(self.sources, Iterable):
            raise ConfigError(f"sources must be a list of names (got {self.sources!r})")
        object.__setattr__(self, "sources", tuple(self.sources))
        for name in self.sources:
            if name not in SOURCE_NAMES:
                raise ConfigError(unknown_name("source", str(name), SOURCE_NAMES))
        if len(set(self.sources)) != len(self.sources):
            raise ConfigError(f"sources must not repeat a name (got {list(self.sources)})")
        if self.num_branches and "context" not in self.sources:
            raise ConfigError(
                f"num_branches={self.num_branches} needs 'context' among the sources, which "
                f"branches fill (got {list(self.sources)}); add it, or set num_branches=0"
            )
