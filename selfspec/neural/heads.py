"""What the heads of a model say of the next tokens: heads that were trained for it, in its files.

Transformers runs them. The first head reads the state before a token and the token itself, a
further one what the head before it made of both. Their KV holds committed tokens alone: columns
that rest on guesses go at once, and are read again with what became of the guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.compat.heads import load_heads, new_kv_of_heads, num_heads, read_by_heads
from selfspec.draft.sources.source import Cursor, RowStart, Source, nothing
from selfspec.draft.sources.worth import SourceWorth
from selfspec.machine.device import seeded, upload
from selfspec.machine.memory import free_memory
from selfspec.records import (
    HEADS,
    Candidate,
    Evidence,
    Likely,
    StepRecord,
    TimeBudget,
    halvings,
    sources_of,
)
from selfspec.weights.streamed.stream import is_streamed

_NUM_STATES = 1024  # Heads read this many of a prompt's last tokens.
_MOST_ROWS = 16  # With 4,096 dimensions, a prompt's states take up to 16 MB a row.
# The bins of chances begin at 0.97, 0.9, 0.75, 0.5, and then at each half of the one before.
_SURE = (0.75, 0.9, 0.97)
_SHARE_OF_FREE = 0.25  # Heads are loaded unasked, so they may take little memory.


def find_heads(model: PreTrainedModel) -> Any | str:
    """The heads of a model, loaded and tried; or why it has none."""
    number = num_heads(model)
    if not number:
        return "its config names no heads that this transformers can run"
    if is_streamed(model):
        return "its weights are streamed, and its head is not always there"
    if not model.config.name_or_path:
        return "it comes from no checkpoint, whose files would hold them"
    try:
        return _loaded(model, number)
    except Exception as error:  # Transformers reads the files of every family by other rules.
        return f"transformers can't run them: {type(error).__name__}: {error!s:.150}"


def _loaded(model: PreTrainedModel, number: int) -> Any | str:
    """The heads, tried once; why there are none if they are too large, and any error if they fail.

    A decoder may name its layers otherwise.
    """
    last = list(model.get_decoder().layers[-1].parameters())
    num_bytes, free = number * sum(weight.nbytes for weight in last), free_memory(last[0].device)
    if num_bytes > _SHARE_OF_FREE * free:
        return f"they take {num_bytes:,} bytes, more than a quarter of the free memory"
    with seeded(None, [last[0].device]):  # Making modules may draw random numbers.
        heads = load_heads(model)
    heads.layers.to(last[0].device, model.dtype).eval()  # The rest of it is the model's own.
    HeadText(heads, [0, 0], last[0].new_zeros(2, heads.config.hidden_size)).chain(0, 1)
    return heads


class HeadSource(Source):
    """The heads of one model. Whether rows ask them is decided for all alike, before each step."""

    name = HEADS

    def __init__(self, heads: Any, top_k: int, worth: SourceWorth) -> None:
        self.is_wanted = True  # Are they asked in the next step?
        self.worth = worth
        self._heads, self._top_k = heads, top_k

    def num_states(self, num_rows: int) -> int:
        return _NUM_STATES if num_rows <= _MOST_ROWS else 0

    def before_step(self, num_rows: int, budget: TimeBudget) -> None:
        self.is_wanted = num_rows <= _MOST_ROWS and self.worth.should_ask(budget)

    def open(self, row: RowStart) -> HeadCursor:
        text = HeadText(self._heads, row.prompt_ids, row.states, row.count_forward)
        return HeadCursor(text, self._top_k, self, row.budget)


class HeadCursor(Cursor):
    """The end of one row's text, as heads see it; a state is how far down their chain it is."""

    def __init__(self, text: HeadText, top_k: int, source: HeadSource, budget: TimeBudget) -> None:
        self._text, self._top_k = text, top_k
        self._source, self._budget = source, budget
        self._has_begun = False
        self._token: int | None = None
        self._chain: list[Likely] = []  # The tokens named in this step.
        self._seconds: float | None = None  # Taken in this step; None if the heads were not asked.

    @property
    def wants_states(self) -> bool:  # type: ignore[override]
        """Only while they are asked, since the hook at the output head takes time."""
        return self._source.is_wanted

    def prepare(self) -> None:
        if self._source.is_wanted and not self._has_begun and self._budget.affords(None):
            start = perf_counter()
            self._text.begin()
            self._has_begun = True
            self._budget.charge(perf_counter() - start)

    def root(self) -> int | None:
        can_ask = self._source.is_wanted and self._has_begun and self._token is not None
        return 0 if can_ask else None

    def expand(self, state: int | None) -> list[Candidate]:
        """The tokens that the heads name after a path. They are asked once, at the root."""
        if state is None:
            return []
        if state == 0:
            assert self._token is not None
            start = perf_counter()
            self._chain = self._text.chain(self._token, self._top_k)
            self._seconds = perf_counter() - start
        likely = self._chain[state] if state < len(self._chain) else []
        return [(token, _evidence(state, chance)) for token, chance in likely]

    def follow(self, state: int | None, token: int) -> int | None:
        """A head goes on after the token that the one before it finds likeliest."""
        if state is None or state + 1 >= len(self._chain) or token != self._chain[state][0][0]:
            return None
        return state + 1

    def observe(self, record: StepRecord) -> None:
        if record.states is not None:
            self._text.learn(record.tree.tokens, record.path, record.states)
        elif self._token is not None:  # The first step is the prompt's.
            self._text.skip(record.committed_ids)
        if self._seconds is not None:
            self._source.worth.observe(seconds=self._seconds, tokens=_num_brought(record))
            self._seconds = None
        self._chain = []
        if record.committed_ids:
            self._token = record.committed_ids[-1]


def _num_brought(record: StepRecord) -> int:
    """The accepted tokens that nobody would have drafted without heads."""
    accepted = record.accepted_nodes()
    for index, node in enumerate(accepted):
        if set(sources_of(record.tree.evidence[node])) == {HEADS}:
            return len(accepted) - index
    return 0


def _evidence(depth: int, chance: float) -> Evidence:
    """Without its rank, which says little more: what is split too finely is never counted."""
    sureness = sum(chance >= bound for bound in _SURE)
    return Evidence(HEADS, depth, count_bin=sureness, probability_bin=halvings(chance))


class HeadText:
    """One row's text as heads have read it.

    Each state is read with the token after it. That of the last one is not known before it is
    asked. Where states are missing, the heads' KV has a gap, and positions go on behind it.
    """

    def __init__(
        self,
        heads: Any,
        ids: Sequence[int],
        states: torch.Tensor | None,
        count_forward: Callable[[], None] = nothing,
    ) -> None:
        """The prompt's tokens, and the states (N, D) after the last of them if they are known."""
        weight = heads.layers[0].eh_proj.weight
        num = 0 if states is None else min(len(ids), len(states), _NUM_STATES)
        self._heads, self._count_forward = heads, count_forward
        self._kv = new_kv_of_heads(heads)
        self._end = len(ids) - num  # The place of the last token, which the model has not read.
        self._states = weight.new_empty(0, heads.config.hidden_size)  # (N, D), to be read
        self._next: list[int] = []  # The tokens after them, all or all but the last one.
        self._places: list[int] = []  # The places of these tokens.
        if states is not None and num:
            self.learn(ids[-num:], range(num), states[-num:])

    def begin(self) -> None:
        if self._next:
            self._read(1)

    def learn(
        self,
        ids: Sequence[int],  # of the nodes of a tree
        path: Sequence[int],
        states: torch.Tensor,  # (N, D)
    ) -> None:
        """Takes in the path of a tree at the end of the text."""
        accepted = [ids[node] for node in path]
        self._next += accepted if self._lacks_token else accepted[1:]
        self._states = torch.cat([self._states, states[list(path)].to(self._states)])
        self._places += range(self._end + 1, self._end + 1 + len(path))
        self._end += len(path)
        self._keep(_NUM_STATES)

    def skip(self, ids: Sequence[int]) -> None:
        if self._lacks_token:
            self._states, self._places = self._states[:-1], self._places[:-1]
        self._end += len(ids)

    def chain(self, token: int, num: int) -> list[Likely]:
        """The likely tokens of each head; the first head's come right after `token`."""
        if not self._lacks_token:  # Nobody knows the state before it.
            return []
        self._next.append(token)
        return self._read(num)

    @property
    def _lacks_token(self) -> bool:
        return len(self._next) < len(self._states)

    @torch.no_grad()
    def _read(self, num: int) -> list[Likely]:
        """Reads the states whose next tokens are known."""
        number, device = len(self._next), self._states.device
        numbers = torch.tensor([self._next, self._places[:number]], device="cpu")
        numbers[0].clamp_(0, self._heads.embed_tokens.num_embeddings - 1)
        ids, places = upload(numbers, device)[:, None]
        self._count_forward()
        logits = read_by_heads(self._heads, ids, self._states[None, :number], places, self._kv)
        num_again = min(self._heads.num_mtp_layers - 1, number)
        if num_again:
            self._kv.crop(-num_again)
        self._keep(len(self._states) - number + num_again)
        return likeliest(logits, num)

    def _keep(self, number: int) -> None:
        """Keeps the last states alone, and what belongs to them."""
        num_gone = max(len(self._states) - number, 0)
        self._states, self._places = self._states[num_gone:], self._places[num_gone:]
        self._next = self._next[num_gone:]


def likeliest(logits: torch.Tensor, num: int) -> list[Likely]:
    """The likeliest tokens, with their chances, by the logits (N, V) of some nodes."""
    logits = logits.float()
    top = logits.topk(min(num, logits.shape[-1]))
    chances = (top.values - logits.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
    # One copy, since a copy waits for the device; a float holds every id below 2**24.
    rows = torch.stack([top.indices.float(), chances], dim=1).tolist()
    return [list(zip(map(int, ids), shares, strict=True)) for ids, shares in rows]
