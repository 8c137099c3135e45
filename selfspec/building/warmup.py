"""Fills the LUTs beforehand: the model reads texts, and the sources learn what it predicts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfspec.building.learned import Learned
from selfspec.building.limits import max_positions, vocab_size
from selfspec.building.progress import Bar
from selfspec.building.recipe import Recipe
from selfspec.building.tokens import Ids
from selfspec.building.work_folder import WorkFolder
from selfspec.compat.generation import KV, kv_of
from selfspec.engine import top_k_of
from selfspec.plugin.spec import SelfSpec
from selfspec.records import TopK
from selfspec.run.packed import PackedWeights, Packing

STAGE = "warmup"
_MAX_LOGITS = 1 << 28  # Elements of one forward's output, to bound its memory.

# Calls a method of `BuildWorker`, which is named first, with each of the jobs. Gives each job with
# its result in the order of the jobs, whoever did it.
CallWorkers = Callable[[str, Iterable[Any]], Iterator[tuple[Any, Any]]]


class Window(NamedTuple):
    """A part of a document that is read at once."""

    document: int
    number: int  # Its index among the windows of the document.
    ids: Ids


class Warmup:
    """One build's reading: how many tokens were read, and where to go on.

    All windows stand behind the tokens of `prefix`, of which nothing is learned. A killed process
    loses what was learned in the last `save_seconds`.
    """

    def __init__(
        self,
        work: WorkFolder,
        recipe: Recipe,
        model: Any,
        spec: SelfSpec,
        *,
        save_seconds: float,
        prefix: Sequence[int] = (),
    ) -> None:
        self._work = work
        self._limit = recipe.warmup_tokens
        self._model = model
        self._save_seconds = save_seconds
        self._saved_at = perf_counter()
        self._learning = False
        self._window = min(recipe.window, max_positions(model) or recipe.window)
        self._vocab_size = vocab_size(model)
        self._rows = max(1, min(recipe.batch, _MAX_LOGITS // (self._vocab_size * self._window)))
        self._reader = Reader(model, min(spec.config.top_k, self._vocab_size), prefix)
        self._learned = Learned(work.part(STAGE), spec, self._vocab_size)
        known = work.progress.get(STAGE, {})
        self.documents: int = known.get("documents", 0)  # Those that were read to their end.
        self.tokens: int = known.get("tokens", 0)
        self.finished: bool = known.get("finished", False)
        self._windows: int = known.get("windows", 0)  # Read of the document after those.
        self._forwards: int = known.get("forwards", 0)
        self._learned.restore(self._forwards)

    def run(
        self, documents: Iterable[Ids | None], bar: Bar, call_workers: CallWorkers | None = None
    ) -> None:
        """Reads documents up to the limit; the first `self.documents` must have been skipped.

        With `call_workers` others read, and ahead. What they say is learned here, in the same
        order.
        """
        batches = self._batches(self._cut(documents))
        readings: Iterator[tuple[list[Window], list[TopK]]]
        readings = ((batch, self._reader.read(batch)) for batch in batches)
        if call_workers is not None:
            readings = call_workers("read", batches)
        try:
            for batch, tops in readings:
                num_tokens = self._learn(batch, tops)
                bar.advance(num_tokens, num_tokens)
                if perf_counter() - self._saved_at >= self._save_seconds:
                    self._save()
        except KeyboardInterrupt:
            if not self._learning:
                self._save()
            raise
        self.finished = True
        self._save()

    def _cut(self, documents: Iterable[Ids | None]) -> Iterator[Window]:
        """Cuts documents into windows that don't overlap; leaves out those read before."""
        begun, first = self._windows, self.documents
        for document, ids in enumerate(documents, start=first):
            if ids is None:
                continue
            done = begun if document == first else 0
            starts = range(0, len(ids), self._window)
            for number in range(done, len(starts)):
                start = starts[number]
                yield Window(document, number, ids[start : start + self._window])

    def _batches(self, windows: Iterator[Window]) -> Iterator[list[Window]]:
        """What is read in one forward each, up to the limit."""
        num_tokens = self.tokens
        while not self._limit or num_tokens < self._limit:
            if not (batch := list(islice(windows, self._rows))):
                return
            yield batch
            num_tokens += sum(len(window.ids) for window in batch)

    def _learn(self, batch: list[Window], tops: list[TopK]) -> int:
        """Shows the sources what was predicted; returns the number of tokens."""
        self._learning = True
        for window, top in zip(batch, tops, strict=True):
            self._learned.memory.observe_pairs(_pairs(window.ids), top)
        self._forwards += 1
        self.documents, self._windows = batch[-1].document, batch[-1].number + 1
        num_tokens = sum(len(window.ids) for window in batch)
        self.tokens += num_tokens
        self._learning = False
        return num_tokens

    def _save(self) -> None:
        self._learned.save(self._forwards)
        progress = {
            "documents": self.documents,
            "windows": self._windows,
            "tokens": self.tokens,
            "forwards": self._forwards,
            "finished": self.finished,
        }
        self._work.note(STAGE, progress)
        self._learned.keep_only(self._forwards)
        self._learned.restore(self._forwards)
        self._saved_at = perf_counter()


class Reader:
    """Runs a model over texts, from packed weights where these are faster.

    Whether they are is settled before the first forward, so that no later one rounds differently.
    All windows stand behind the tokens of the `prefix`, which is read once.
    """

    def __init__(self, model: Any, top_k: int, prefix: Sequence[int] = ()) -> None:
        self._model = model
        self._top_k = top_k
        self._prefix = list(prefix)
        self._cache: Any = None  # The KV cache behind the prefix, once it was read.
        self._packing = Packing(PackedWeights.of(model), model)

    def read(self, windows: Sequence[Window]) -> list[TopK]:
        """What the model predicts after each token of each window, by one forward."""
        self._packing.pack()
        with self._packing.in_use():
            behind = self._behind(len(windows)) if self._prefix else None
            return predictions(self._model, windows, self._top_k, behind)

    @torch.inference_mode()
    def _behind(self, num_rows: int) -> Any:
        """A KV cache with the prefix in each row, for a forward to fill further."""
        if self._cache is None:
            ids = torch.tensor([self._prefix], device=self._model.device)
            outputs = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            self._cache = kv_of(outputs)
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(num_rows)
        return cache


@torch.inference_mode()
def predictions(model: Any, windows: Sequence[Window], top_k: int, behind: Any) -> list[TopK]:
    """Runs one forward; returns what the model predicts after each token of each window.

    `behind` is a KV cache that the windows continue; None if they begin a text.
    """
    rows = [window.ids for window in windows]
    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device="cpu")
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        mask[row, : len(ids)] = 1
    device = model.device
    more: dict[str, Any] = {"use_cache": False}
    if behind is not None:
        known = torch.ones(len(rows), behind.get_seq_length(), dtype=torch.long, device="cpu")
        mask = torch.cat([known, mask], dim=1)
        more = {"use_cache": True, KV: behind}
    logits = model(input_ids=input_ids.to(device), attention_mask=mask.to(device), **more).logits
    return [top_k_of(logits[row, : len(ids)], top_k) for row, ids in enumerate(rows)]


def _pairs(ids: Ids) -> NDArray[np.int64]:
    """(N, 2): for each token the one before it, or -1, and the token itself."""
    tokens = ids.astype(np.int64)
    return np.stack([np.concatenate([[-1], tokens[:-1]]), tokens], axis=-1)
