"""A rounded copy is the model but for its linear layers, and reads what the model would read."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from selfspec.compat.generation import KV
from selfspec.forward.columns import KVRow
from selfspec.forward.sizes import Policy
from selfspec.forward.tree_kv import TreeKV
from selfspec.neural.copy_source import CopyText
from selfspec.neural.rounded_copy import RoundedCopy, RoundedLinear, copy_bytes, rounded_copy
from selfspec.plugin.spec import SelfSpec
from tests.fakes import new_model, prompt


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_all_else_is_shared(name: str) -> None:
    model = new_model()
    copy = rounded_copy(model, name)
    assert isinstance(copy, RoundedCopy)
    parts: Any = copy.run
    rounded = [part for part in parts.modules() if isinstance(part, RoundedLinear)]
    assert copy.num_bytes == copy_bytes(model, name) > 0
    theirs, ours = (dict(tree.named_parameters()) for tree in (model, parts))
    assert all(ours[path] is theirs[path] for path in ours)
    assert len(rounded) == len(theirs) - len(ours)
    assert rounded_copy(model, name) is copy


def test_it_goes_with_its_model() -> None:
    model = new_model()
    SelfSpec(draft_model="int8").runner(model)
    model.forward = model.forward  # As a hook of another library sets it.
    copy = weakref.ref(rounded_copy(model, "int8"))
    assert copy() is not None
    del model
    gc.collect()
    assert copy() is None


def test_a_model_in_another_dtype_gets_another_copy() -> None:
    model = new_model()
    first = rounded_copy(model, "int8")
    assert rounded_copy(model.double().bfloat16(), "int8") is not first


class Unrounded:
    """A copy that is the model itself."""

    def __init__(self, model: Any) -> None:
        self.run, self.options = model, {"logits_to_keep": 1}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_paths_are_read_with_their_ancestors_in_one_forward(name: str) -> None:
    """Whatever the order, the logits are those of the text with the path at its end."""
    model, spec = new_model(name), SelfSpec()
    attention = spec.support(model).attention
    assert attention is not None
    ids, last = prompt()["input_ids"], 5
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{KV: cache})
    kv, row = TreeKV(attention, Policy()), KVRow(num_columns=ids.shape[1])
    row.position = np.array(ids.shape[1])
    kv.add(cache, [row])
    forwards = list[int]()
    copy: Any = Unrounded(model)
    text = CopyText(copy, kv, lambda: forwards.append(1))
    assert text.read(()) is None
    text.observe([last])
    for path in ((7, 8, 9), (7, 3), (4,), (7, 8, 9, 2, 6)):
        logits = text.read(path)
        assert logits is not None
        whole = torch.cat([ids, torch.tensor([[last, *path]])], dim=1)
        with torch.no_grad():
            expected = model(input_ids=whole).logits[0, -1]
        assert torch.allclose(logits, expected, atol=1e-4)
    assert len(forwards) == 4
