"""How the next token is chosen and committed: for one row alone, or for a whole batch.

Knows logits, processors and stopping rules as tensors and callables, and a row as its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from selfspec.machine.device import CPU, Device, Fetched
from selfspec.records import Draws
from selfspec.verify.logits import likeliest
from selfspec.verify.shortlist import Warpers, shortlist
from selfspec.verify.tape import NoiseTape, RowDraws

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ChoosableRow(Protocol):
    """A row as its chooser sees it."""

    new_ids: list[int]
    is_done: bool
    pad_token_id: int

    @property
    def on_token(self) -> Callable[[], None]: ...

    @property
    def num_new(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_padded(self) -> bool: ...

    def prefix(self) -> torch.Tensor: ...

    def commit(self, token: int) -> bool: ...


class StepLogits:
    """The logits (B, Q, V) of a step.

    Their likeliest tokens come from a device in one copy for all rows, and with them their logits,
    which are NaN if any logit of their node is. On a CPU, where nothing has to be waited for, only
    the nodes that are visited are looked at.
    """

    def __init__(self, logits: torch.Tensor, device: Device = CPU) -> None:
        self.logits = logits
        self._fetched: Fetched | None = None
        self._choices: list[list[int]] = []
        self._highest: list[list[float]] = []
        self._last = (-1, -1), (0, 0.0)  # The last node and what is likeliest there.
        if type(device) is not Device or logits.device.type != "cpu":
            ids = likeliest(logits)
            highest = logits.gather(-1, ids[..., None]).squeeze(-1)
            self._fetched = device.fetch(ids, highest)

    def likeliest(self, index: int, node: int) -> tuple[int, float]:
        """The likeliest token after a node of a row, and its logit."""
        if self._fetched is None:
            if self._last[0] != (index, node):
                logits = self.logits[index, node].float().numpy()
                token = int(logits.argmax())
                self._last = (index, node), (token, float(logits[token]))
            return self._last[1]
        if not self._choices:
            self._choices, self._highest = (tensor.tolist() for tensor in self._fetched.get())
        return self._choices[index][node], self._highest[index][node]


class GreedyChooser:
    """Greedy decoding with no processors: one batched argmax and one sync for a step."""

    moves_together = False  # Do all rows get their next token at once?
    draws = Draws()

    def commit(
        self, texts: Sequence[ChoosableRow], nodes: Sequence[int], logits: StepLogits, index: int
    ) -> tuple[list[int], bool]:
        """Commits the token after each row's node; have all of these rows stopped now?

        The first row has the logits at `index`.
        """
        token, _ = logits.likeliest(index, nodes[0])
        return [token], texts[0].commit(token)


def _unchanged(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


class Processing(NamedTuple):
    """A row's processors: the first ones, and the last ones, which may be known as `warpers`.

    The last ones never look at the prefix.
    """

    first: Processors | None
    last: Processors = _unchanged
    warpers: Warpers | None = None


class ProcessedChooser:
    """Processors and sampling, only at visited nodes, with their true prefixes.

    A visit makes the CPU wait for a GPU.
    """

    moves_together = False
    draws = Draws()

    def __init__(
        self, processing: Processing, tape: NoiseTape | None = None, number: int = 0
    ) -> None:
        """`number` is the row's on the tape of noise; without a tape the choice is greedy."""
        self._processing = processing
        self._tape = tape
        self._number = number
        if tape is not None:
            self.draws = RowDraws(tape, number, processing.warpers or Warpers())

    def commit(
        self, texts: Sequence[ChoosableRow], nodes: Sequence[int], logits: StepLogits, index: int
    ) -> tuple[list[int], bool]:
        """Commits the token after a node, drawn with its step's noise if the call samples."""
        text, node = texts[0], nodes[0]
        token = self._choose(logits.logits[index, node : node + 1], text)
        stops = text.commit(token)
        if self._tape is not None:
            self._tape.reach(self._number, math.inf if stops else text.num_new)
        return [token], stops

    def _choose(self, logits: torch.Tensor, text: ChoosableRow) -> int:
        """The next token by the logits (1, V) after a node."""
        first, last, warpers = self._processing
        # Only a processor that is not known may write to the scores, and needs a copy.
        scores = logits.to(text.device, torch.float32, copy=first is not None)
        if first is not None:
            scores = first(text.prefix(), scores)
        if self._tape is None:
            return int(last(text.prefix(), scores).argmax(-1))
        place, token = (self._number, text.num_new), None
        if warpers is not None and scores.device.type == "cpu" and scores.dtype == torch.float32:
            few = shortlist(scores[0], warpers)
            token = few and self._tape.draw_from(few, scores[0], *place)
        if token is None:
            token = self._tape.draw(last(text.prefix(), scores)[0], *place)
        return token


@dataclass
class BatchChooser:
    """The body of transformers' loop without its forward, for all rows at once.

    For processors and criteria that may look at the whole batch or count their calls, for
    recorded scores, for a KV cache that is handed back, and for chains. Rows that stopped go on
    with the pad token, as in transformers.
    """

    ids: torch.Tensor  # (B, L): all texts so far, laid out as transformers' loop lays out its ids
    processors: Processors
    criteria: Callable[..., torch.Tensor]
    do_sample: bool
    keeps_scores: bool = False
    keeps_logits: bool = False
    generator: torch.Generator | None = None  # None: the one that transformers uses.
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    moves_together = True
    draws = Draws()

    def commit(
        self, texts: Sequence[ChoosableRow], nodes: Sequence[int], logits: StepLogits, index: int
    ) -> tuple[list[int], bool]:
        """Commits one token to every row, with one call of the processors and the criteria."""
        picked = logits.logits[range(len(nodes)), list(nodes)]
        picked = picked.to(self.ids.device, torch.float32, copy=True)
        scores = self.processors(self.ids, picked)
        if self.keeps_scores:
            self.scores.append(scores)
        if self.keeps_logits:
            self.logits.append(picked)
        if self.do_sample:
            chances = scores.softmax(-1)
            tokens = torch.multinomial(chances, num_samples=1, generator=self.generator).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        padded = torch.tensor([text.is_padded for text in texts], device=tokens.device)
        tokens = tokens.masked_fill(padded, texts[0].pad_token_id)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        kept = tuple(self.scores) if self.keeps_scores else None
        stopped = self.criteria(self.ids, kept).tolist()
        committed: list[int] = tokens.tolist()
        for text, token, stops in zip(texts, committed, stopped, strict=True):
            text.new_ids.append(token)
            text.is_done = text.is_done or stops
        texts[0].on_token()
        return committed, all(text.is_done for text in texts)


Chooser = GreedyChooser | ProcessedChooser | BatchChooser
