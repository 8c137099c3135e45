"""The prompt teaches exactly what the model said, and stock's own logits are untouched."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from selfspec import learning
from selfspec.compat.generation import KV, kv_of
from selfspec.draft.calibration import Calibration
from selfspec.draft.learned import Learned
from selfspec.forward import prompt as prompt_module
from selfspec.forward.prompt import Prefilled, PromptReader
from selfspec.learning import teach, top_k_of
from selfspec.records import TopK
from tests.fakes import VOCAB, prompt, tiny_model

K = 4
MODELS = ("llama", "cohere")  # the latter scales what its head puts out


@pytest.fixture(autouse=True)
def many_teach(monkeypatch):
    """As on a GPU, so that the short prompts of these tests are taught whole."""
    monkeypatch.setitem(prompt_module._NUM_TEACHING, "cpu", 64)


class Listener:
    """A source that keeps what the prompt taught, by the last two tokens."""

    name = "listener"

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], tuple[list[int], np.ndarray]] = {}
        self.num_told = 0

    def observe_pairs(self, pairs: np.ndarray, top: TopK) -> None:
        for pair, ids, probabilities in zip(pairs.tolist(), *top, strict=True):
            self.rows[tuple(pair)] = (ids.tolist(), probabilities)
            self.num_told += 1


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def forward(model: PreTrainedModel, batch: dict[str, torch.Tensor], **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, position_ids=positions(batch["attention_mask"]), **kwargs).logits


def reader_of(model: PreTrainedModel, *, listens: bool = True) -> PromptReader:
    return PromptReader(model, torch.empty(1, 0), {}, None, learns=listens)


def taught(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], *, listens: bool = True
) -> tuple[Listener, torch.Tensor]:
    """Reads the prompt through a reader, as a call does; returns what was heard, and the logits."""
    reader = reader_of(model, listens=listens)
    with reader.keeping_states({"logits_to_keep": 1}) as kwargs:
        logits = forward(model, batch, **kwargs)
    return heard(model, batch, reader, logits), logits


def heard(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    reader: PromptReader,
    logits: torch.Tensor,
) -> Listener:
    """What a prompt teaches that was read."""
    listener, mask = Listener(), torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
    prompt = Prefilled(batch["input_ids"], {"attention_mask": mask}, logits[:, -1], reader.hidden)
    memory = Learned([listener], Calibration(), top_k=K)  # type: ignore[list-item]
    with torch.no_grad():
        teach(memory, prompt, model.get_output_embeddings(), model.config.vocab_size)
    return listener


def taught_by_a_full_forward(
    model: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> dict[tuple[int, int], TopK]:
    """For each two tokens of the prompts, padding left out: the top-K where they came last."""
    top = top_k_of(forward(model, batch), K)
    last = {}
    for row, (ids, mask) in enumerate(
        zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    ):
        for column, counts in enumerate(mask):
            if counts:
                first = column == 0 or not mask[column - 1]
                pair = (-1 if first else ids[column - 1], ids[column])
                last[pair] = TopK(top.ids[row, column], top.probabilities[row, column])
    return last


def pairs_of(ids: torch.Tensor) -> set[tuple[int, int]]:
    """The last two tokens at each place of one row; -1 before the first."""
    tokens = [-1, *ids.flatten().tolist()]
    return set(itertools.pairwise(tokens))


def hooks(model: PreTrainedModel) -> int:
    return len(model.get_output_embeddings()._forward_pre_hooks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_token_of_the_prompt_teaches_its_top_k_and_the_last_logits_are_stocks(name, num_rows):
    """To the bit."""
    model, batch = tiny_model(name), prompt(num_rows)
    stock = forward(model, batch, logits_to_keep=1)
    listener, logits = taught(model, batch)
    assert torch.equal(logits, stock)
    truth = taught_by_a_full_forward(model, batch)
    assert listener.rows.keys() == truth.keys()
    assert_same_rows(listener.rows, truth)
    assert listener.num_told == len(truth)  # a pair that comes twice is told once


def assert_same_rows(rows, truth):
    for pair, (ids, probabilities) in rows.items():
        assert ids == list(truth[pair][0])
        np.testing.assert_allclose(probabilities, truth[pair][1], rtol=4e-3, atol=1e-6)


def test_the_hook_is_gone_afterwards_and_after_an_error_too():
    model = tiny_model()
    before = hooks(model)
    taught(model, prompt())
    assert hooks(model) == before
    with pytest.raises(KeyboardInterrupt), reader_of(model).keeping_states({"logits_to_keep": 1}):
        raise KeyboardInterrupt
    assert hooks(model) == before


def test_another_threads_forward_passes_by():
    """It gets all its logits, and teaches nobody."""
    model, batch, other = tiny_model(), prompt(seed=1), prompt(seed=2)
    whole, elsewhere = forward(model, other), []
    reader = reader_of(model)
    with reader.keeping_states({"logits_to_keep": 1}) as kwargs:
        thread = threading.Thread(target=lambda: elsewhere.append(forward(model, other)))
        thread.start()
        thread.join()
        logits = forward(model, batch, **kwargs)
    assert torch.equal(elsewhere[0], whole)
    listener = heard(model, batch, reader, logits)
    assert listener.rows.keys() == pairs_of(batch["input_ids"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("chunk", "most"), [(5 * VOCAB + 1, 5 * VOCAB), (1, VOCAB)])
def test_chunks_teach_the_same_and_bound_what_is_held(name, chunk, most, monkeypatch):
    model, batch = tiny_model(name), prompt()
    whole, _ = taught(model, batch)
    monkeypatch.setattr(learning, "_CHUNK_ELEMENTS", chunk)
    sizes: list[int] = []  # The number of logits in each of the head's outputs.
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, _a, output: sizes.append(output.numel()))
    parts, _ = taught(model, batch)
    handle.remove()
    assert max(sizes) == most
    assert len(sizes) > 3
    assert parts.rows.keys() == whole.rows.keys()
    assert_same_rows(parts.rows, whole.rows)


@pytest.mark.parametrize("is_taught", [False, True])
def test_a_prompt_in_pieces_or_behind_an_earlier_kv_teaches_what_was_read_now(is_taught):
    """Only the new tokens go through the head."""
    model, batch, asked = tiny_model(), prompt(), {"logits_to_keep": 1}
    ids, reader = batch["input_ids"], reader_of(model)
    with torch.no_grad():
        with reader.keeping_states(asked) if is_taught else nullcontext(asked) as kwargs:
            past = kv_of(model(ids[:, :10], **kwargs))
        with reader.keeping_states(asked) as kwargs:
            logits = model(ids[:, 10:], **{KV: past}, **kwargs).logits
    listener, tokens = heard(model, batch, reader, logits), [-1, *ids[0].tolist()]
    read_now = tokens if is_taught else tokens[10:]
    assert listener.rows.keys() == set(itertools.pairwise(read_now))
    truth = taught_by_a_full_forward(model, batch)
    assert all(listener.rows[pair][0] == truth[pair].ids.tolist() for pair in listener.rows)
