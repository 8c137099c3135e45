"""Heads say what they would say if they had read the committed text at once."""

from __future__ import annotations

import pytest
import torch

from selfspec.neural import heads as module
from selfspec.neural.heads import HeadText, find_heads
from tests.fakes import new_model, prompt, tiny_model
from tests.heads import FAMILIES, heads_of, model_with_heads, needs_heads
from tests.lossless.same import GREEDY, run_both

pytestmark = needs_heads
PATHS = [[0], [0, 1, 3], [0, 2, 5], [0, 1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_rejected_draft_is_left_in_their_kv(family: str) -> None:
    model = model_with_heads(family)
    heads = heads_of(model).eval()
    generator = torch.Generator().manual_seed(5)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, heads.config.hidden_size, generator=generator)

    ids, states = torch.randint(90, (11,), generator=generator).tolist(), new(11)
    text, counted = HeadText(heads, ids, states, lambda: counted.append(1)), []
    text.begin()
    root = 7
    for step, path in enumerate(PATHS * 2):
        if step != 3:  # A step may pass in which nobody asks.
            text.chain(root, 4)
        tree = [root, *torch.randint(90, (5,), generator=generator).tolist()]
        seen = new(6)
        text.learn(tree, path, seen)
        ids, states = [*ids, *(tree[node] for node in path)], torch.cat([states, seen[path]])
        root = step
    found, expected = text.chain(root, 4), HeadText(heads, ids, states).chain(root, 4)
    assert len(found) == len(expected) == heads.num_mtp_layers
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], rel=1e-3)
    assert len(counted) == 9


def test_they_say_nothing_where_no_state_is_known() -> None:
    heads = heads_of(model_with_heads()).eval()
    text = HeadText(heads, [1, 2, 3], None)
    text.begin()
    assert text.chain(4, 2) == []
    text.learn([4], [0], torch.ones(1, heads.config.hidden_size))
    text.skip([5, 6])
    assert text.chain(6, 2) == []
    text.learn([6], [0], torch.ones(1, heads.config.hidden_size))
    assert text.chain(10**6, 2)  # An id that the model can't read is read as its last one.


def test_why_a_model_has_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "config names no heads" in find_heads(tiny_model())
    model = model_with_heads()
    assert "can't run them" in find_heads(model)
    monkeypatch.setattr(module, "free_memory", lambda _: 1)
    assert "more than a quarter of the free memory" in find_heads(model)
    monkeypatch.setattr(module, "is_streamed", lambda _: True)
    assert "weights are streamed" in find_heads(model)
    model.config.name_or_path = ""
    monkeypatch.undo()
    assert "comes from no checkpoint" in find_heads(model)


def test_a_decoder_that_names_its_layers_otherwise_decodes_without_heads() -> None:
    model = new_model("gpt2")
    model.config.num_mtp_layers, model.config.name_or_path = 1, "somewhere"
    both = run_both(model, prompt(), drafts=False, **GREEDY)
    assert "can't run them: AttributeError" in str(both.stats.heads_reason)
