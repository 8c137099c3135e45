"""How a model is run: what it can verify, and what runs its forwards.

A `ModelRunner` is what one `SelfSpec` knows of one model, from call to call. It is the one place
that knows of captured graphs, packed and streamed weights.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

from selfspec.ability.look import Look, look_at
from selfspec.ability.probe import DraftSupport, probe
from selfspec.ability.user_code import distrusted
from selfspec.compat.generation import decoding_switches
from selfspec.compat.heads import num_heads
from selfspec.compat.modules import uncompiled
from selfspec.compat.states import state_functions
from selfspec.config import SpecConfig
from selfspec.cost import Ledger
from selfspec.cuda.kept import KeptRunner
from selfspec.cuda.runner import StaticRunner, stepped
from selfspec.draft.sources import Source
from selfspec.draft.sources.worth import SourceWorth
from selfspec.forward.backends import Backend, TreeBackend, bytes_of_rows
from selfspec.forward.chains import ChainBackend
from selfspec.forward.costs import Costs
from selfspec.forward.model import EagerForwards, device_of
from selfspec.forward.sizes import Limits, Policy
from selfspec.kept_kv import PrefixStore
from selfspec.machine.device import device_for
from selfspec.machine.memory import amount_in_bytes, free_memory
from selfspec.neural.copy_source import CopySource
from selfspec.neural.heads import HeadSource, find_heads
from selfspec.records import HEADS
from selfspec.stats import GenerationStats
from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.packing import linears_of, may_be_packed
from selfspec.weights.streamed.stream import is_streamed

_log = logging.getLogger("selfspec")

_MOST_STATES = 16  # The most states of one model whose verdicts are kept.
_PACKING_NOTE = (
    "weights are not packed: attach(model, pack=True) makes steps of several tokens faster on a CPU"
)


class ModelRunner:
    """How one model is run for one `SelfSpec`.

    Several threads may use it. Each model is tried by one of them, and the others wait. Of what two
    threads tell `ledger` or `heads_worth` in the same moment, one part may be lost: these are means
    of many steps, which decide how much is drafted, and never on a token.

    `costs` knows what steps take, `ledger` what drafts have gained and lost with the model so far,
    and `heads_worth` what its heads have.
    """

    def __init__(self, model: Any, config: SpecConfig) -> None:
        self.config = config
        self.costs = Costs()
        self.ledger = Ledger()
        self.heads_worth = SourceWorth()
        # Draft models that were checked, and what one of their forwards brings and takes.
        self.draft_models: WeakKeyDictionary[Any, SourceWorth] = WeakKeyDictionary()
        self._model = ref(model)  # A call that runs it holds it; else it may be freed.
        self._supports: dict[Hashable, DraftSupport] = {}  # by the state of the model
        self._trying = threading.Lock()
        self._captured = KeptRunner()
        self._kept_kv: PrefixStore | str = ""
        self._state_of_kv: Hashable = None
        self._heads: tuple[Any, Any] | None = None  # and the device and dtype that they are for

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    def support(self, look: Look | None = None, *, trusts_hooks: bool = False) -> DraftSupport:
        """What the model can verify as it is now; tried on first use, unless it must not be."""
        look, is_trusted = look or look_at(self.model), trusts_hooks or self.config.trust_hooks
        if look.foreign and not is_trusted and (reason := distrusted(look.foreign)) is not None:
            return DraftSupport("plain", reason, None)
        model, state = look.model, look.verdict_key
        with self._trying:  # A second thread waits for the first one's verdict.
            if state in self._supports:
                return self._supports[state]
            start = perf_counter()
            with uncompiled(model):
                support = probe(model)
            name, seconds = type(model).__name__, perf_counter() - start
            _log.info("%s can verify: %s (tried in %.2f s)", name, support.mode, seconds)
            if len(self._supports) == _MOST_STATES:
                del self._supports[next(iter(self._supports))]
            self._supports[state] = support
            return support

    def kept_kv(self, look: Look) -> PrefixStore | str:
        """What was kept of texts that the model has read as it is now; or why nothing can be.

        What was read in another state is dropped, and who still reads in it keeps nothing more.
        """
        with self._trying:
            state = look.kv_key()
            if state != self._state_of_kv:
                if isinstance(self._kept_kv, PrefixStore):
                    self._kept_kv.close()
                self._kept_kv = state if isinstance(state, str) else PrefixStore(self._kept_bytes())
                self._state_of_kv = state
            return self._kept_kv

    @property
    def kept_kv_bytes(self) -> int:
        """Bytes of the keys and values of texts that have ended."""
        return self._kept_kv.num_bytes if isinstance(self._kept_kv, PrefixStore) else 0

    def forget_kept_kv(self) -> None:
        """Drops the keys and values of all texts that have ended."""
        if isinstance(store := self._kept_kv, PrefixStore):
            store.drop()

    def _kept_bytes(self) -> int | None:
        """The most that the knob lets be kept; None if it says nothing."""
        amount = self.config.kept_kv
        if not amount:
            return None if amount is None else 0
        return amount_in_bytes(amount, free_memory(device_of(self.model)), name="kept_kv")

    def _eager_forwards(self, look: Look, reason: str | None) -> EagerForwards:
        """How forwards are run that are not captured, as the model's weights are now."""
        if is_streamed(look.model):
            if self.config.forward == "graph":
                reason = "its weights are streamed, and only plain operations wait for them"
            return EagerForwards("streamed", reason)
        if any(type(tensor) is PackedWeight for tensor in look.modules.tensors):
            return EagerForwards("packed", reason)
        layers = linears_of(look.model, look.modules.all)
        note = _PACKING_NOTE if may_be_packed(look.model, layers) else None
        return EagerForwards("eager", reason, note)

    @property
    def _captures(self) -> bool:
        """Are forwards captured, if nothing prevents it?"""
        device, forward = device_for(device_of(self.model)), self.config.forward
        is_wanted = forward == "graph" or (forward == "auto" and device.can_capture)
        return is_wanted and not is_streamed(self.model)

    def sources(self, top_k: int) -> list[Source]:
        """The sources that are parts of the model: its heads."""
        if HEADS not in self.config.sources or isinstance(heads := self.heads(), str):
            return []
        return [HeadSource(heads, top_k, self.heads_worth)]

    def heads(self) -> Any | str:
        """The heads that came with the model, loaded on first use; or why there are none."""
        model = self.model
        with self._trying:
            key = device_of(model), model.dtype
            if self._heads is None or self._heads[0] != key:
                self._heads = key, find_heads(model)
                _log.info("heads of %s: %s", type(model).__name__, self._heads[1])
            return self._heads[1]

    def _why_no_heads(self, backend: Backend) -> str | None:
        """Why the heads that the model's config promises are not asked, if they are wanted."""
        if HEADS not in self.config.sources or not num_heads(self.model):
            return None
        if not backend.shows_states:
            return "captured forwards show nobody the hidden states that heads read"
        heads = self.heads()
        return heads if isinstance(heads, str) else None

    def describe(self, stats: GenerationStats, backend: Backend, draft_model: Any) -> None:
        """Writes how forwards were run, and what the model's own sources have taken."""
        stats.mode = "chain" if backend.chains_only else "tree"
        stats.forward = backend.forward_name
        stats.captured_bytes = self._captured.num_bytes
        stats.eager_reason, stats.packing_note = backend.reason, backend.packing_note
        stats.heads_reason = self._why_no_heads(backend)
        if draft_model is not None:
            stats.draft_model_reason = stats.idle_reason
        if isinstance(draft_model, CopySource):
            stats.draft_model_bytes = draft_model.num_bytes
            stats.draft_model_reason = draft_model.reason or stats.idle_reason

    def decoding(self) -> AbstractContextManager[None]:
        """Inside, transformers' own switches for decoding are set."""
        return decoding_switches(self.model)

    def limits(self, max_rows: int, max_bytes: int | None) -> Limits:
        """How many rows may run at once, and how much memory they may take."""
        most = self.config.max_nodes
        surplus = stepped(most) - most if self._captures else 0
        if max_bytes is None:
            return Limits(max_rows, None, surplus)
        num_bytes, of_states = bytes_of_rows(self.model, max_rows)
        max_tokens = max_rows * (max(max_bytes - of_states, 0) // max(num_bytes, 1))
        return Limits(max_rows, max_tokens, surplus, num_bytes, of_states)

    @contextmanager
    def backend(
        self, look: Look, support: DraftSupport, limits: Limits | None = None
    ) -> Iterator[Backend]:
        """What runs the forwards of one call, or of rows that come and go within limits.

        It has no rows yet. Captured forwards belong to one call or session at a time.
        """
        model, attention = look.model, support.attention
        lent: AbstractContextManager[StaticRunner | str | None] = nullcontext()
        if self._captures:
            if attention is None:
                lent = nullcontext("a chain grows transformers' KV cache, which has no fixed slots")
            else:
                lent = self._captured.borrow(look, attention, limits)
        with uncompiled(model), lent as captured:
            if isinstance(captured, StaticRunner):
                assert attention is not None
                yield TreeBackend(model, attention, captured)
                return
            eager = self._eager_forwards(look, captured)
            if attention is None:
                yield ChainBackend(model, eager, state_functions(look.modules.all))
            else:
                yield TreeBackend(model, attention, policy=Policy(limits), eager=eager)
