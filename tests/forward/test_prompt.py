"""A prompt's last hidden states are kept for who asks, and stock's own logits are untouched."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.compat.generation import KV, kv_of
from selfspec.forward.prompt import PromptReader
from tests.fakes import prompt, tiny_model

ONE = {"logits_to_keep": 1}


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def forward(model: PreTrainedModel, batch: dict[str, torch.Tensor], **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, position_ids=positions(batch["attention_mask"]), **kwargs).logits


def reader_of(model: PreTrainedModel, num_states: int = 64) -> PromptReader:
    reader = PromptReader(model, torch.empty(1, 0), {}, None, learns=True)
    reader._num_states = num_states
    return reader


def hooks(model: PreTrainedModel) -> int:
    return len(model.get_output_embeddings()._forward_pre_hooks)


@pytest.mark.parametrize("name", ["llama", "cohere"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_states", [0, 5, 64])
def test_the_last_states_are_kept_and_the_last_logits_are_stocks(name, num_rows, num_states):
    """To the bit. Cohere scales what its head puts out."""
    model, batch, seen = tiny_model(name), prompt(num_rows), []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    forward(model, batch)
    handle.remove()
    stock, reader = forward(model, batch, **ONE), reader_of(model, num_states)
    with reader.keeping_states(ONE) as kwargs:
        assert torch.equal(forward(model, batch, **kwargs), stock)
    if num_states:
        assert torch.equal(reader.hidden, seen[0][:, -num_states:])
    else:
        assert reader.hidden is None


def test_the_hook_is_gone_afterwards_and_after_an_error_too():
    model = tiny_model()
    with reader_of(model).keeping_states(ONE):
        assert hooks(model) == 1
    assert hooks(model) == 0
    with pytest.raises(KeyboardInterrupt), reader_of(model).keeping_states(ONE):
        raise KeyboardInterrupt
    assert hooks(model) == 0


def test_another_threads_forward_passes_by():
    """It gets all its logits, and its states are nobody's."""
    model, batch, other = tiny_model(), prompt(seed=1), prompt(seed=2)
    whole, elsewhere, reader = forward(model, other), [], reader_of(model)
    with reader.keeping_states(ONE):
        thread = threading.Thread(target=lambda: elsewhere.append(forward(model, other)))
        thread.start()
        thread.join()
        assert reader.hidden is None
        forward(model, batch)
    assert torch.equal(elsewhere[0], whole)
    assert reader.hidden.shape[:2] == batch["input_ids"].shape


def test_a_prompt_in_pieces_shows_the_states_of_all_of_them():
    model, ids = tiny_model(), prompt()["input_ids"]
    whole, parts = reader_of(model), reader_of(model)
    with torch.no_grad():
        with whole.keeping_states(ONE) as kwargs:
            model(ids, **kwargs)
        with parts.keeping_states(ONE) as kwargs:
            past = kv_of(model(ids[:, :10], **kwargs))
        with parts.keeping_states(ONE) as kwargs:
            model(ids[:, 10:], **{KV: past}, **kwargs)
    torch.testing.assert_close(parts.hidden, whole.hidden)
