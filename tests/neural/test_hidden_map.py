"""The map is the ridge regression that its docstring names, however its pairs come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from selfspec.forward.model import at_output_head
from selfspec.neural import hidden_map as module
from selfspec.neural.hidden_map import HiddenMap, MapWeights
from tests.fakes import new_model, prompt, tiny_model

DIMS, NUM_IDS = 16, 60


def likely(state_map: HiddenMap, token: int, num: int) -> list[tuple[int, float]]:
    """What a map names after a token; nothing if it knows nothing."""
    return next(iter(state_map.chain(token, num)), [])


@pytest.fixture
def weights() -> MapWeights:
    generator = torch.Generator().manual_seed(3)
    embeddings, head = torch.randn(2, NUM_IDS, DIMS, generator=generator)
    return MapWeights(embeddings, head, None)


class Text:
    """A text of random trees, and the map that learns it; knows all pairs that were shown."""

    def __init__(self, weights: MapWeights, num_known: int = 9, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = weights
        ids, states = self.ids(12), self.states(num_known)
        self.map = HiddenMap(weights, ids, states)
        self.map.name(range(NUM_IDS))
        known = ids[len(ids) - num_known :]
        self.pairs = [(states[i], known[i + 1], states[i + 1], 1.0) for i in range(num_known - 1)]
        self.last = states[-1] if num_known else None
        self.next = ids[0]

    def ids(self, number: int) -> list[int]:
        return torch.randint(NUM_IDS, (number,), generator=self.generator).tolist()

    def states(self, number: int) -> torch.Tensor:
        return torch.randn(number, DIMS, generator=self.generator)

    def step(self) -> None:
        """A tree in which nodes 0, 1 and 3 are accepted."""
        ids, states, parents, path = self.ids(6), self.states(6), [-1, 0, 0, 1, 3, 2], [0, 1, 3]
        self.map.learn(ids, parents, path, states)
        befores = [self.last, *(states[parent] for parent in parents[1:])]
        trusts = [3.0 if node in path else 1.0 for node in range(6)]
        shown = zip(befores, ids, states, trusts, strict=True)
        self.pairs += [pair for pair in shown if pair[0] is not None]  # type: ignore[misc]
        self.last, (self.next,) = states[path[-1]], self.ids(1)

    def scores(self, pairs: list[Any]) -> torch.Tensor:
        """(V,): what the regression says, solved at once in double precision."""
        size, length = self.map._scales
        before, after = (torch.stack([pair[i] for pair in pairs]).double() for i in (0, 2))
        tokens = torch.tensor([*(pair[1] for pair in pairs), self.next])
        embedded = self.weights.embeddings[tokens].double() * length
        before = torch.cat([before, self.last.double()[None]]) * size
        by_state, by_token = before @ before.T, embedded @ embedded.T
        alike = by_state + by_token + by_state * by_token
        ridge = torch.diag(0.1 / torch.tensor([pair[3] for pair in pairs]).double())
        shares = torch.linalg.solve(alike[:-1, :-1] + ridge, alike[:-1, -1])
        return self.weights.head.double() @ (shares @ after)

    def check(self, pairs: list[Any]) -> None:
        expected = self.scores(pairs).softmax(-1).topk(5)
        tokens = likely(self.map, self.next, 5)
        assert [token for token, _ in tokens] == expected.indices.tolist()
        assert [p for _, p in tokens] == pytest.approx(expected.values.tolist(), rel=1e-3)


@pytest.mark.parametrize("num_known", [9, 1, 0])
def test_pairs_that_come_step_by_step_give_what_all_at_once_give(weights, num_known):
    text = Text(weights, num_known)
    for _ in range(20):
        text.step()
        text.check(text.pairs)


def test_steps_without_drafts_are_learned_later(weights):
    text = Text(weights)
    for _ in range(5):
        text.step()
    text.check(text.pairs)


def test_a_prompt_is_learned_however_late_the_map_is_asked(weights, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 4)
    text = Text(weights)
    num_prompt = len(text.pairs)
    for _ in range(9):
        text.step()
    num_step = (len(text.pairs) - num_prompt) // 9
    text.check(text.pairs[:num_prompt] + text.pairs[-3 * num_step :])


def test_of_too_many_pairs_the_newest_are_kept(weights, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PAIRS", 40)
    text = Text(weights)
    for _ in range(30):
        text.step()
        likely(text.map, text.next, 1)
        assert text.map._ridge.num <= 40
    text.check(text.pairs[-text.map._ridge.num :])


def test_after_unseen_steps_it_goes_on_with_the_next_tree(weights):
    text = Text(weights)
    text.map.skip()
    assert likely(text.map, 1, 3) == []
    text.last = None
    text.step()
    text.check(text.pairs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_it(weights, value):
    text = Text(weights)
    text.map.learn([1, 2], [-1, 0], [0, 1], torch.full((2, DIMS), value))
    for _ in range(2):
        assert all(0 <= p <= 1 for _, p in likely(text.map, 1, 3))


def test_ids_without_an_embedding_or_a_row_of_the_head_do_no_harm(weights):
    text = Text(weights)
    text.map.learn([NUM_IDS + 7, 2], [-1, 0], [0], text.states(2))
    text.map.name([NUM_IDS, -1, 5])
    assert all(0 <= token < NUM_IDS for token, _ in likely(text.map, NUM_IDS + 7, 9))


def test_it_names_tokens_of_the_prompt_and_those_that_it_was_given(weights):
    states = torch.randn(2, DIMS, generator=torch.Generator().manual_seed(5))
    state_map = HiddenMap(weights, [7, 3], states)
    assert {token for token, _ in likely(state_map, 3, 9)} == {3, 7}
    state_map.name([5])
    assert {token for token, _ in likely(state_map, 3, 9)} == {3, 5, 7}


def test_without_a_token_that_the_head_knows_it_names_none(weights):
    weights = weights._replace(bias=torch.ones(NUM_IDS))
    state_map = HiddenMap(weights, [NUM_IDS, NUM_IDS + 1], torch.ones(2, DIMS))
    assert likely(state_map, 3, 9) == []


def test_rows_that_cannot_be_read_give_no_map():
    assert MapWeights.of(tiny_model()) is not None
    model: Any = new_model()
    model.lm_head = nn.Sequential(model.lm_head)
    assert MapWeights.of(model) is None
    assert MapWeights.of(new_model().to("meta")) is None
    compiled: Any = new_model()
    compiled.model._compiled_call_impl = len  # as `compile()` leaves it
    assert MapWeights.of(compiled) is None


def test_the_states_are_those_that_enter_the_head():
    model, inputs = tiny_model(), prompt()
    states: list[torch.Tensor] = []
    with torch.no_grad(), at_output_head(model, states.append):
        logits = model(**inputs).logits
    assert torch.equal(model.lm_head(states[0]), logits)
    with torch.no_grad():
        model(**inputs)
    assert len(states) == 1
