"""`SelfSpec`: what a user passes to `generate()`, and the owner of all that is learned."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, finalize

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.ability.probe import IN_CHAINS, DraftSupport
from selfspec.cache import CacheContents, RememberedFile, load_cache, save_cache
from selfspec.cache.memory_loader import DraftMemoryLoader
from selfspec.compat.modules import inside_wrappers
from selfspec.compat.versions import untried_reason
from selfspec.config import SpecConfig
from selfspec.cost import Budget, MeasuredBudget
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import DraftMemory
from selfspec.draft.shape import Shape
from selfspec.draft.sources import Source
from selfspec.engine import Engine, OnStep
from selfspec.errors import ConfigError, UnsupportedError, check_names
from selfspec.forward.backends import Backend
from selfspec.kept_kv import PrefixStore
from selfspec.papers import method_of, options_of
from selfspec.plugin.parts import check_draft_model, check_parts
from selfspec.prompt import Call, Prompt
from selfspec.runner import ModelRunner
from selfspec.stats import GenerationStats

_log = logging.getLogger("selfspec")


class SelfSpec:
    """Drafts for `generate()`; keeps what it learns from call to call.

    Use one for all models that share a tokenizer. Safe to use from several threads. It is the best
    of five papers: `selfspec.papers` says which piece comes from which, and `as_in` gives the
    method of one of them alone.

    Args:
        config: All knobs at once. Or name them one by one: ``SelfSpec(max_nodes=32)``.
        remember: A file to keep in what is learned: opened at the first call if it is there, and
            saved once in five minutes of use and at the end. Several processes may share one.
            Nothing is saved with ``learning="request"`` or ``"frozen"``. None: nothing is kept.
        tokenizer: The model's tokenizer, which `remember` needs; a file of another one is refused.
        contents: What a cache holds; `from_pretrained` loads one by its name.
        extra_sources: Sources of your own, asked after those that `config.sources` names. What
            their `copy` gives learns, so that `forget` drops it.
        budget: A `Budget` of your own, or the knob of that name.
        shape: A `Shape` of your own, which says which trees are drafted.
        calibration: How evidence becomes a chance, for sources that know it; None: it is counted.
        draft_model: A small model of transformers with the same tokenizer, which drafts too. Or
            "int4" or "int8": the model itself, with weights that are rounded to 4 or 8 bits.
            ``generate(..., assistant_model=small)`` names one for a single call.

    Attributes:
        config: The knobs, a frozen `SpecConfig`.
        draft_model: The small model that drafts; None if there is none.
        stats: `GenerationStats` of the last call that ended, or broke off.
        total_stats: The same over all calls so far.
    """

    def __init__(
        self,
        config: SpecConfig | None = None,
        *,
        remember: str | os.PathLike[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        contents: CacheContents | None = None,
        extra_sources: Sequence[Source] = (),
        budget: Budget | str | None = None,
        shape: Shape | None = None,
        calibration: Calibration | None = None,
        draft_model: Any = None,
        **knobs: Any,
    ) -> None:
        check_parts(config, extra_sources, contents, shape, calibration, draft_model)
        self._budget = budget if isinstance(budget, Budget) else None
        if budget is not None:
            knobs["budget"] = budget if self._budget is None else "fixed"
        self.config = (config or SpecConfig()).changed(**knobs)
        self.stats, self.total_stats = GenerationStats(), GenerationStats()
        self.draft_model = draft_model
        self._runners: WeakKeyDictionary[Any, ModelRunner] = WeakKeyDictionary()
        self._warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        self._on_step: list[OnStep] = []
        self._lock = threading.Lock()
        remembered = None
        if remember is not None:
            owner = tokenizer if contents is None else contents.tokenizer
            saves = self.config.learning == "session"
            remembered = RememberedFile(remember, owner, saves=saves)
        self._learned = DraftMemoryLoader(
            self.config,
            loaded=contents,
            remembered=remembered,
            extra_sources=extra_sources,
            calibration=calibration,
            shape=shape,
        )
        if remembered is not None:
            finalize(self, self._learned.end)  # Runs at the end of the process at the latest.

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | os.PathLike[str],
        *,
        revision: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> SelfSpec:
        """A `SelfSpec` that starts with what a cache holds: a file, or a repository on the Hub.

        Args:
            path_or_hub_id: A file may be named without its ending ``.safetensors``.
            revision: Branch, tag or commit of the Hub repository.
            tokenizer: The model's tokenizer; a cache of another one is refused. Without it, a
                model is refused at its first call if its vocabulary lacks ids of the cache.
            options: Knobs, and all else that `SelfSpec` takes.
        """
        contents = load_cache(path_or_hub_id, revision=revision, tokenizer=tokenizer)
        return cls(contents=contents, **options)

    @classmethod
    def as_in(cls, paper: str, **options: Any) -> SelfSpec:
        """The method of one paper, for comparisons; `SelfSpec()` is the best of all.

        Args:
            paper: "diaa", "self-draft", "edgellm" or "ghidorah".
            options: The paper's own, as its file in `selfspec.papers` names them; knobs, and what
                `SelfSpec` takes besides, such as `contents` for DIAA's warm-up. EdgeLLM needs
                `draft_model`, and Ghidorah `tree`, a file of ``python -m eval fit``.
        """
        if (draft_model := options.get("draft_model")) is not None:
            check_draft_model(draft_model)
        known = options_of(paper) | {field.name for field in fields(SpecConfig)}
        known |= {*signature(cls).parameters} - {"config", "knobs"}
        check_names(f"option of as_in({paper!r})", options, known)
        return cls(**method_of(paper, **options))

    def __repr__(self) -> str:
        return f"SelfSpec({self.config})"

    def __call__(self, *_: Any, **_arguments: Any) -> NoReturn:
        """Refuses to be the loop of a model that is not attached."""
        raise UnsupportedError(  # A reader in another thread might never stop waiting.
            "custom_generate= needs an attached model, since transformers hands neither "
            "streamer nor tokenizer to a loop of ours (got a model that is not attached); call "
            "selfspec.attach(model) once, then generate(..., assistant=spec)"
        )

    def count(self, call: Call) -> None:
        """Counts a call that broke off."""
        with self._lock:
            self.stats = call.stats
            self.total_stats = self.total_stats + call.stats

    def finish(self, prompt: Prompt) -> None:
        """Counts a call that has ended, warns if it was not drafted for, and saves."""
        self.count(prompt)
        self.warn(prompt.model, prompt.stats)
        if prompt.streamer is not None:  # Its reader may ask for statistics now.
            prompt.streamer.end()
        self._learned.save_if_due()

    def learned(self, vocab_size: int) -> DraftMemory:
        return self._learned.of(vocab_size)

    def forget(self) -> None:
        """Goes back to what was loaded, or to nothing, and drops the vocabulary it was tied to.

        Keys and values that `kept_kv` has kept are dropped too. With `remember`, what was learned
        since the last save is never saved. The file stays as it is, and the next call opens it
        anew; to forget that too, delete the file first.
        """
        self._learned.forget()
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            runner.forget_kept_kv()

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        overwrite: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes everything that was loaded or learned to a cache, whole or not at all.

        Args:
            path: A new file; ``.safetensors`` is added where it is missing.
            tokenizer: The model's tokenizer, to which the cache will belong. Not needed after
                `from_pretrained`, which knows it.
            overwrite: Whether to replace an existing cache. Other files are never replaced.
            about: Facts for the cache's card, such as corpus and licence, as JSON values.
        """
        save_cache(path, self._learned.contents(tokenizer, about), overwrite=overwrite)

    def save_learned(self) -> None:
        """Saves what was learned to the file of `remember` now; what others saved there stays.

        Nothing is written if nothing was learned since the last save.
        """
        if self._learned.remembered is None:
            raise ConfigError(
                "save_learned() needs a file (got remember=None); make the SelfSpec with "
                "remember=FILE, or call save_pretrained()"
            )
        self._learned.save()

    @contextmanager
    def listening(self, on_step: OnStep) -> Iterator[None]:
        """Inside, calls `on_step` with the `StepRecord` of every row in every step.

        The first record of a row has a tree of one node: the prompt's forward yields its token.
        """
        self._on_step.append(on_step)
        try:
            yield
        finally:
            self._on_step.remove(on_step)

    def support(self, model: PreTrainedModel) -> DraftSupport:
        """What a model can verify as it is now; tried on first use."""
        return self.runner(model).support()

    ability = support  # Its name before 0.4.

    def runner(self, model: PreTrainedModel) -> ModelRunner:
        """How a model, or the model inside a wrapper, is run for this `SelfSpec`."""
        model = inside_wrappers(model)
        with self._lock:
            if not self._runners and (untried := untried_reason(transformers.__version__)):
                _log.warning("%s; use one of these, or a newer selfspec", untried)
            if model not in self._runners:
                self._runners[model] = ModelRunner(model, self.config)
            return self._runners[model]

    def engine(
        self,
        runner: ModelRunner,
        backend: Backend,
        prompt: Prompt | None,
        kept_kv: PrefixStore | str | None,
    ) -> Engine:
        """The engine of one prompt, or of many that come and go."""
        learned, is_measured = self._learned.of, self.config.budget == "measured"
        if prompt is not None and prompt.is_default:
            learned = partial(self._learned.or_nothing, prompt.stats.disable)
        budget = MeasuredBudget(ledger=runner.ledger) if is_measured else Budget()
        if self._budget is not None:
            budget = self._budget.open()
        return Engine(
            runner, backend, learned=learned, budget=budget, on_step=self._on_step, kept_kv=kept_kv
        )

    def warn(self, model: PreTrainedModel, stats: GenerationStats) -> None:
        """Says why a model is not drafted for in trees, once for each model and reason.

        And why its forwards are not run as `config.forward` says.
        """
        known = self._warned.setdefault(model, set())
        drafted = "drafted for in chains" if stats.mode == "chain" else "not drafted for"
        reasons = {drafted: stats.disabled_reason, "run eagerly": stats.eager_reason}
        for what, reason in reasons.items():
            if reason is not None and reason not in known:
                known.add(reason)
                name, why = type(model).__name__, reason.removesuffix(IN_CHAINS)
                _log.warning("%s is %s: %s", name, what, why)
