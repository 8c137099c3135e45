"""What a call took up to its first token, and from then on."""

from __future__ import annotations

import pytest

from eval.runs.timing import timed
from tests.fakes import new_model, prompt, tiny_model


@pytest.mark.parametrize("loop", ["plain", "prompt lookup", "assisted"])
def test_the_first_token_ends_the_time_of_the_prompt(loop):
    model, forwards = new_model(), []
    options = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    more = options.get(loop, {"assistant_model": tiny_model()})
    handle = model.register_forward_hook(lambda *_: forwards.append(len(streamer.stamps)))

    def run(first_token):
        nonlocal streamer
        streamer = first_token
        limits = {"max_new_tokens": 6, "do_sample": False}
        return model.generate(**prompt(), **limits, streamer=streamer, **more)

    streamer = None
    result = timed(model, run)
    handle.remove()
    assert forwards[:2] == [1, 2], "the prompt is there before the first forward, a token after it"
    assert 0 < result.prefill_seconds < result.seconds
    assert timed(model, lambda _: prompt()["input_ids"]).prefill_seconds == 0
