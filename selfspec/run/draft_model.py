"""What a draft model says: behind a text, and behind the nodes of a tree that grows from it.

A text has a KV of its own, which holds the committed tokens and, behind them, all nodes that were
read in this step. One forward reads any number of further nodes. Knows tokens and slots; not why a
node is read, nor what the target says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV, record_past
from selfspec.cost import Pacing
from selfspec.machine.device import upload
from selfspec.records import Likely, Queries
from selfspec.run.backends import TreeBackend
from selfspec.run.graphs.backend import GraphBackend
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.layout import Layout
from selfspec.run.model import AttentionTypes, device_of, takes
from selfspec.run.packed import Packing

__all__ = ["DraftModel", "DraftText"]

_CHUNK = 512  # At most this many tokens are read in one forward.
_ROOM = 256  # The KV starts with this many slots behind the prompt.
# The same for captured forwards, which are made anew when there are more slots.
_STATIC_CHUNK = 63
_STATIC_ROOM = 4096


class DraftModel:
    """A small model, and how to ask it; keeps nothing of any text.

    `num_ids` is how many ids the target knows: others are never named. `top_k` is how many tokens
    are named behind a node. `pacing` knows what it costs and brings; `packing` packs its weights
    when that pays. `runner` replays captured forwards for one text.
    """

    def __init__(
        self,
        model: Any,
        attention: AttentionTypes,
        pacing: Pacing,
        *,
        num_ids: int,
        top_k: int,
        packing: Packing | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.attention = attention
        self.pacing = pacing
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.num_forwards = 0
        self.runner: StaticRunner | None = None
        self._packing = packing
        self._vocab_size: int = config.vocab_size
        self._num_named = min(num_ids, config.vocab_size)
        self._top_k = min(top_k, self._num_named)

    def open(self) -> DraftText:
        """A text that has no tokens yet."""
        return DraftText(self)

    def known(self, token_ids: Sequence[int]) -> list[int]:
        """The same ids; one that the model lacks becomes its last one."""
        return [min(token, self._vocab_size - 1) for token in token_ids]

    def backend(self, cache: Any, num_tokens: int) -> TreeBackend | GraphBackend:
        """What reads nodes behind a text; the first one to ask gets the captured forwards."""
        arguments = (cache, self.attention, torch.tensor([[num_tokens]], device="cpu"), None)
        runner, self.runner = self.runner, None
        if runner is not None:
            sizes: Any = {"room": _STATIC_ROOM, "widest": _STATIC_CHUNK + 1}
            with suppress(torch.OutOfMemoryError):
                return GraphBackend(self.model, runner, *arguments, **sizes)
        return TreeBackend(self.model, *arguments, room=_ROOM)

    @contextmanager
    def forward(self, num_tokens: int) -> Iterator[None]:
        """Inside, one forward is run over `num_tokens` tokens; packs weights first if that pays."""
        self.num_forwards += 1
        if self._packing is None:
            yield
            return
        self._packing.before_forward(num_tokens)
        with self._packing.in_use():
            yield

    def likely(self, logits: torch.Tensor) -> list[Likely]:
        """The likeliest next tokens behind each of N nodes, from their logits (N, V)."""
        logits = logits[:, : self._num_named].float()
        top = logits.topk(self._top_k)
        chances = (top.values - logits.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
        # One copy, since each waits for the device; a float holds every id below 2**24.
        named = torch.stack([top.indices.float(), chances]).tolist()
        return [
            list(zip(map(int, ids), shares, strict=True))
            for ids, shares in zip(*named, strict=True)
        ]


class DraftText:
    """One row's text as a draft model has read it, and the nodes that it has read behind it.

    Nodes are named by the order in which they were read; node 0 is the last token of the text.
    A captured forward reads all of them again, since its shape has no place for earlier ones.
    `setting_up` has the seconds that went into captures when it was asked last.

    ::

        columns   t t t t t | n n n n        t committed   n node of this step
        node              0   1 2 3 4
    """

    def __init__(self, draft_model: DraftModel) -> None:
        self._draft_model = draft_model
        self._backend: TreeBackend | GraphBackend | None = None
        self.setting_up = 0.0
        self._nodes = Queries([], [], [])

    @property
    def room(self) -> float:
        """How many tokens may still come before the model runs out of positions."""
        longest = self._draft_model.max_length
        held = 0 if self._backend is None else self._backend.kv.lengths[0] + 1
        return float("inf") if longest is None else longest - held

    def pays_to_begin(self, num_tokens: int, num_left: float) -> bool:
        """Is a prompt of `num_tokens` tokens worth reading, with `num_left` still to write?"""
        return self._draft_model.pacing.pays_to_begin(num_tokens, num_left)

    @torch.no_grad()
    def extend(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens of the text, one at least; returns what is likely behind them.

        Forgets all nodes.
        """
        self.setting_up = 0.0
        if self._backend is None:
            start = perf_counter()
            likely = self._begin(token_ids)
            self._draft_model.pacing.observe_prompt(perf_counter() - start, len(token_ids))
            return likely
        self.keep([0])
        chunk = _CHUNK if isinstance(self._backend, TreeBackend) else _STATIC_CHUNK
        for first in range(0, len(token_ids), chunk):
            part = token_ids[first : first + chunk]
            logits = self._forward(part, range(len(part)))
            self.keep(range(len(part) + 1))
        return self._draft_model.likely(logits[-1:])[0]

    @torch.no_grad()
    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        """Reads nodes in one forward; returns what is likely behind each. Parents come first."""
        self.setting_up = 0.0
        return self._draft_model.likely(self._forward(token_ids, parents))

    def keep(self, path: Sequence[int]) -> None:
        """The nodes of a path, which starts with node 0, become text; all others are forgotten."""
        assert self._backend is not None
        self._backend.commit([path])
        self._stand_on(self._nodes.tokens[path[-1]])

    def _begin(self, token_ids: Sequence[int]) -> Likely:
        """Reads the text's first tokens as stock would, in parts, and takes over the KV."""
        model = self._draft_model.model
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        known = torch.tensor([self._draft_model.known(token_ids)], device="cpu")
        ids = upload(known, device_of(model))
        options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        parts = torch.split(ids, _CHUNK, dim=1)
        for part in parts:
            if part is parts[-1] and self._draft_model.runner is not None:
                # The last token is read again, so its window begins before that of the next one.
                record_past(cache)
            with self._draft_model.forward(part.shape[1]):
                outputs = model(input_ids=part, use_cache=True, **{KV: cache}, **options)
            logits = outputs.logits
        self._backend = self._draft_model.backend(cache, len(token_ids))
        self._stand_on(self._draft_model.known(token_ids[-1:])[0])
        return self._draft_model.likely(logits[0, -1:])[0]

    def _stand_on(self, token: int) -> None:
        """Makes the last column of the KV node 0, from which all others descend."""
        assert self._backend is not None
        self._backend.kv.reopen()
        self._nodes = Queries([token], [-1], [0])

    def _forward(self, token_ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """The logits (N, V) of further nodes; their KV stays behind that of the earlier ones."""
        backend, nodes, read = self._backend, self._nodes, len(self._nodes.tokens)
        assert backend is not None
        for token, parent in zip(self._draft_model.known(token_ids), parents, strict=True):
            nodes.tokens.append(token)
            nodes.parents.append(parent)
            nodes.depths.append(nodes.depths[parent] + 1)
        with backend.kv.behind(read):  # What is in front of new slots stays if they have to move.
            backend.kv.reserve(len(token_ids))
        layout: Any = backend.lay_out([nodes])
        self.setting_up += backend.setting_up
        with self._draft_model.forward(len(token_ids)):
            if isinstance(backend, GraphBackend):
                return backend.forward(layout)[0, read:]
            with backend.kv.behind(read):
                return backend.forward(_last(layout, read))[0]


def _last(layout: Layout, first: int) -> Layout:
    """The queries of a layout from one node on; they see the same columns."""
    masks = {
        name: mask if mask is None else mask[:, :, first:] for name, mask in layout.masks.items()
    }
    return Layout(layout.input_ids[:, first:], layout.position_ids[..., first:], masks)
