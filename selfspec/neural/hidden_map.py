"""What the model's own hidden states say of the token after next: a map that one text fits.

The state that enters the output head holds what the model expects. From the state before a token
and the embedding of that token, a ridge regression guesses the state after it, and so which tokens
come next. It learns from all tokens of the prompt and all verified nodes, accepted or not,
since the forward gives all their states anyway. Nothing is trained, and nothing outlives the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from selfspec.compat.modules import embeddings_of, is_compiled
from selfspec.draft.sources.source import RowStart
from selfspec.draft.sources.state_cursor import StateCursor, StateSource
from selfspec.draft.sources.worth import SourceWorth
from selfspec.records import MAP, Likely
from selfspec.weights import gives_rows

# In a batch of more rows, maps would take more time than they save. With 2,048 dimensions a
# map takes up to 60 MB.
_MOST_MAPS = 4
_NUM_STATES = 641  # The map learns from this many of a prompt's last states.
_MAX_PAIRS = 1024  # Of more, the older half is forgotten.
_RIDGE = 0.1
_TRUST = 3.0  # An accepted token weighs as much as this many of the prompt, or rejected ones.
_MAX_NAMES = 6144  # Tokens among which the likeliest are looked for.
_MOST_WAITING = 32  # Steps without drafts are learned later, at most this many.


class MapWeights(NamedTuple):
    """The weights of a model that a map reads."""

    embeddings: torch.Tensor  # (V, E)
    head: torch.Tensor  # (V, D)
    bias: torch.Tensor | None  # (V,)

    @classmethod
    def of(cls, model: PreTrainedModel) -> MapWeights | None:
        """Those of a model on a CPU with a plain head; None if single rows can't be read."""
        inputs, head = embeddings_of(model), model.get_output_embeddings()
        if not isinstance(inputs, nn.Embedding) or type(head) is not nn.Linear:
            return None
        if any(map(is_compiled, model.modules())):  # It would be compiled anew with every hook.
            return None
        weights = inputs.weight, head.weight
        if not all(map(gives_rows, weights)):  # What is streamed is not always there.
            return None
        if not all(w.is_floating_point() and w.device.type == "cpu" for w in weights):
            return None
        return cls(*weights, head.bias)


class HiddenStateSource(StateSource):
    """Opens maps for the rows of one engine; `worth` says whether maps pay with its model."""

    name = MAP

    def __init__(self, model: PreTrainedModel, top_k: int, worth: SourceWorth) -> None:
        super().__init__(worth, _MOST_MAPS)
        self._model = model
        self._top_k = top_k

    def num_states(self, num_rows: int) -> int:
        is_possible = num_rows <= _MOST_MAPS and MapWeights.of(self._model) is not None
        return _NUM_STATES if is_possible else 0

    def open(self, row: RowStart) -> StateCursor | None:
        weights = MapWeights.of(self._model)
        if weights is None or not row.learns or row.num_rows > _MOST_MAPS:
            return None
        state_map = HiddenMap(weights, row.prompt_ids, row.states)
        return StateCursor(state_map, self._top_k, self, row.budget)


class _Pairs(NamedTuple):
    """Tokens, with the states before and after them."""

    before: torch.Tensor  # (N, D)
    embedded: torch.Tensor  # (N, E)
    after: torch.Tensor  # (N, D), or those of the first N - 1
    trust: torch.Tensor  # (N,), as `after`


class _Ridge:
    """Kernel ridge regression that gets more pairs, step by step.

    Two pairs are alike as s + e + s e, with the products s of their states before and e of their
    embeddings. Of the factor L of the kernel matrix K = L L', its inverse M is kept, and M times
    the states after. Both grow by rows, and what was computed stays, so that no error adds up. A
    step looks at N (E + 2 D + 2 N) numbers for N pairs.
    """

    def __init__(self, num_dims: int, embedding_dims: int) -> None:
        def rows(width: int) -> torch.Tensor:  # Takes memory once it is written to.
            return torch.empty(_MAX_PAIRS, width, dtype=torch.float32, device="cpu")

        self._pairs = _Pairs(rows(num_dims), rows(embedding_dims), rows(num_dims), rows(1)[:, 0])
        self._solved, self._inverse = rows(num_dims), rows(_MAX_PAIRS)
        self.num = 0

    def guess(self, new: _Pairs) -> torch.Tensor:
        """Takes in all pairs but the last one; returns the state (D,) that may come after that."""
        if self.num + len(new.after) > _MAX_PAIRS:
            new = self._forgotten(new)
        num_new = len(new.after)
        start, end = self.num, self.num + num_new
        inverse, solved = self._inverse[:start, :start], self._solved[:start]
        before, embedded = self._pairs.before[:start], self._pairs.embedded[:start]
        left = _alike(new, before, embedded) @ inverse.T  # (num_new + 1, start): rows of L
        known = left @ solved
        among = _alike(new, new.before, new.embedded).addmm_(left, left.T, alpha=-1)
        factor = torch.linalg.cholesky(among[:-1, :-1] + torch.diag(_RIDGE / new.trust))
        eye = torch.eye(num_new, dtype=torch.float32, device="cpu")
        corner = torch.linalg.solve_triangular(factor, eye, upper=False)  # of M
        self._inverse[:start, start:end] = 0
        self._inverse[start:end, :start] = -corner @ (left[:-1] @ inverse)
        self._inverse[start:end, start:end] = corner
        self._solved[start:end] = corner @ (new.after - known[:-1])
        for known_part, new_part in zip(self._pairs, new, strict=True):
            known_part[start:end] = new_part[:num_new]
        self.num = end
        state: torch.Tensor = known[-1] + (corner @ among[:-1, -1]) @ self._solved[start:end]
        return state

    def _forgotten(self, new: _Pairs) -> _Pairs:
        """Forgets all pairs; returns the newest ones in front of new ones."""
        first = max(self.num - max(_MAX_PAIRS // 2 - len(new.after), 0), 0)
        kept = [part[first : self.num] for part in self._pairs]
        self.num = 0
        surplus = max(len(new.after) - _MAX_PAIRS, 0)
        joined = (torch.cat([old, more[surplus:]]) for old, more in zip(kept, new, strict=True))
        return _Pairs(*joined)


def _alike(pairs: _Pairs, before: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """How alike pairs (N,) are to other pairs (M,): (N, M)."""
    by_state, by_token = pairs.before @ before.T, pairs.embedded @ embedded.T
    return torch.addcmul(by_state + by_token, by_state, by_token)


class HiddenMap:
    """The map of one text, which begins with a prompt."""

    def __init__(
        self, weights: MapWeights, ids: Sequence[int], states: torch.Tensor | None
    ) -> None:
        """The prompt's tokens (P,), and the states (N, D) after the last of them, if known."""
        if states is None:
            states = torch.empty(0, weights.head.shape[1], dtype=torch.float32, device="cpu")
        num_known = min(len(ids), len(states), _NUM_STATES)
        states, ids_known = states[len(states) - num_known :].float(), ids[len(ids) - num_known :]
        self._weights = weights
        self._scales = _scale(states), _scale(self._read(ids_known))  # Of states, of embeddings.
        # (1, D): the state before the next token; none if unknown. A view would keep all of them.
        self._last = states[-1:].clone()
        self._waiting = [self._pairs(states[:-1], ids_known[1:], states[1:])]
        self._ridge = _Ridge(weights.head.shape[1], weights.embeddings.shape[1])
        self._names: list[int] = []
        self._named: set[int] = set()
        self._head = torch.empty(
            _MAX_NAMES, weights.head.shape[1], dtype=torch.float32, device="cpu"
        )
        self._num_in_head = 0  # How many names have their row there.
        self._is_finite = True
        self.name(ids)

    def begin(self) -> None:
        self.chain(0, 1)

    def name(self, ids: Iterable[int]) -> None:
        for token in ids:
            if token not in self._named and 0 <= token < len(self._weights.head):
                self._named.add(token)
                self._names.append(token)

    def learn(
        self,
        ids: Sequence[int],  # of the nodes of a tree
        parents: Sequence[int],
        path: Sequence[int],
        states: torch.Tensor,  # (N, D)
    ) -> None:
        """Takes in a tree at the end of the text, which now ends with its path and one token."""
        states = states[: len(ids)].float()
        is_known = len(self._last)  # Is the state before the root?
        before = torch.cat([self._last, states[list(parents[1:])]])
        pairs = self._pairs(before, ids[1 - is_known :], states[1 - is_known :])
        pairs.trust[[node + is_known - 1 for node in path[1 - is_known :]]] = _TRUST
        self._waiting.append(pairs)
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[0 if self._ridge.num else 1]  # The prompt's pairs are first.
        self._last = states[path[-1] :][:1]

    def skip(self, _ids: Sequence[int] = ()) -> None:
        self._last = self._last[:0]

    def chain(self, token: int, num: int) -> list[Likely]:
        """The likeliest tokens after the next one, `token`, if anything is known.

        A map sees no farther.
        """
        if not len(self._last) or not self._is_finite:
            return []
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            last = self._pairs(self._last, [token], self._last[:0])
            new = _Pairs(*map(torch.cat, zip(*self._waiting, last, strict=True)))
            self._waiting = []
            try:
                state = self._ridge.guess(new)
            except RuntimeError:  # No factor is to be had of what is not finite.
                self._is_finite = False
                return []
            return [self._nearest(state, num)]

    def _nearest(self, state: torch.Tensor, num: int) -> Likely:
        """The names that a state makes likeliest, with their chances among all names."""
        names = self._names[:_MAX_NAMES]
        if fresh := names[self._num_in_head :]:
            rows = embedding(torch.tensor(fresh, device="cpu"), self._weights.head)
            self._head[self._num_in_head : len(names)] = rows
            self._num_in_head = len(names)
        scores = self._head[: len(names)] @ state
        if self._weights.bias is not None:
            scores += self._weights.bias[torch.tensor(names, dtype=torch.long, device="cpu")]
        chances, places = scores.softmax(-1).nan_to_num_(0.0).topk(min(num, len(names)))
        return [(names[i], p) for i, p in zip(places.tolist(), chances.tolist(), strict=True)]

    def _pairs(self, before: torch.Tensor, ids: Sequence[int], after: torch.Tensor) -> _Pairs:
        of_states, of_embeddings = self._scales
        embedded = self._read(ids) * of_embeddings
        return _Pairs(before * of_states, embedded, after, after.new_ones(len(after)))

    def _read(self, ids: Sequence[int]) -> torch.Tensor:
        """(N, E): embeddings. An id that the model can't read stands for the last one."""
        embeddings = self._weights.embeddings
        tokens = torch.tensor(ids, dtype=torch.long, device="cpu").clamp_(0, len(embeddings) - 1)
        return embedding(tokens, embeddings).float()


def _scale(vectors: torch.Tensor) -> float:
    """What makes vectors (N, D) as long as 1 on average."""
    length = float(vectors.norm(dim=-1).mean()) if len(vectors) else 1.0
    return 1 / length if length > 0 else 1.0
