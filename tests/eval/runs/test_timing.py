"""When the first call of `generate()` has read its prompt."""

from __future__ import annotations

import pytest

from eval.runs.timing import told_of_prompt
from tests.fakes import new_model, prompt, tiny_model


@pytest.mark.parametrize("loop", ["plain", "prompt lookup", "assisted"])
def test_the_end_of_a_prompt_is_told_once_and_before_the_second_forward(loop):
    model, told = new_model(), []
    options = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    more = options.get(loop, {"assistant_model": tiny_model()})
    handle = model.register_forward_hook(lambda *_: told.append("forward"))
    with told_of_prompt(model, lambda: told.append("read")):
        model.generate(**prompt(), max_new_tokens=6, do_sample=False, **more)
    handle.remove()
    assert (told.count("read"), told.index("read")) == (1, 1)
    assert "_update_model_kwargs_for_generation" not in vars(model)
