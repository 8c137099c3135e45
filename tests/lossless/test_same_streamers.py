"""Streamers get each token once, in stock's order and shape, and are told the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from selfspec import SelfSpec
from selfspec import engine as engine_module
from selfspec.learning import learn
from tests.fakes import attached_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import (
    GREEDY,
    MODES,
    NUM_COLUMNS,
    Call,
    assert_same_ids,
    doubting,
    knowing,
    run,
    run_both,
    slow,
)


class Recorder(BaseStreamer):  # type: ignore[misc]
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append((tuple(value.shape), str(value.device), value.dtype, value.tolist()))

    def end(self) -> None:
        self.told.append("end")


def recording() -> dict[str, Any]:
    return {"streamer": Recorder()}


def test_the_first_token_is_told_before_anything_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streamer, known_by_then = Recorder(), []

    def noted(*args: Any) -> Any:
        known_by_then.append(len(streamer.told))
        return learn(*args)

    monkeypatch.setattr(engine_module, "learn", noted)
    run(attached_model(), prompt(), streamer=streamer, assistant=SelfSpec(), **GREEDY)
    assert known_by_then[0] == 2  # The prompt and a token.


@pytest.mark.parametrize("eos", [None, [15, 91]], ids=["endless", "ends"])
def test_streamers_are_told_what_stock_tells(eos: list[int] | None, call: Call) -> None:
    for seed in range(3):
        options = {"seed": seed, "fresh": recording, "eos_token_id": eos, **call.options}
        both = run_both(tiny_model("mistral"), prompt(call.num_rows, seed=seed), **options)
        stock, ours = both.stock_extras["streamer"], both.our_extras["streamer"]
        assert ours.told == stock.told
        assert ours.told.count("end") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["th", "ca"], "tokenizer": tiny_tokenizer()},
        {"stop_strings": ["th", "ca"], "tokenizer": tiny_tokenizer(), "eos_token_id": 2},
        {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": [15, 91]},
        {"max_time": 1e5},
        {"repetition_penalty": 1.2, "eos_token_id": [15, 91]},
        {"max_new_tokens": 1},
        {"use_cache": False},
    ],
    ids=["strings", "strings-eos", "scores", "time", "penalty", "one", "plain"],
)
@pytest.mark.parametrize(
    ("name", "num_rows"), [("llama", 1), ("bloom", 3), slow("llama", 3), slow("bloom", 1)]
)
def test_streamers_under_every_pace(name: str, num_rows: int, options: dict[str, Any]) -> None:
    more = {"fresh": recording, "drafts": False, "entrance": "assistant", **GREEDY, **options}
    both = run_both(attached_model(name), prompt(num_rows), **more)
    assert both.our_extras["streamer"].told == both.stock_extras["streamer"].told


class _Enough(Recorder):
    """Ends a call in the way in which an iterator ends."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.told) == 4:
            raise StopIteration("enough")


@pytest.mark.parametrize("options", [{}, {"custom_generate": SelfSpec()}])
def test_a_streamer_that_stops_the_call(options: dict[str, Any]) -> None:
    with pytest.raises(StopIteration, match="enough"):
        run(attached_model(), prompt(), streamer=_Enough(), **options, **GREEDY)


def test_tokens_are_streamed_before_the_call_ends() -> None:
    """Three steps: the streamer hears of the tokens as they are accepted."""
    model, inputs = tiny_model(), prompt()
    spec = knowing(run(model, inputs, **GREEDY).ids, inputs, max_nodes=8)
    streamer, heard = Recorder(), []
    with spec.listening(lambda record: heard.append(len(streamer.told))):
        run(model, inputs, custom_generate=spec, streamer=streamer, **GREEDY)
    # the prompt, its first token, and eight each; `end` comes behind the last step
    assert heard == [2, 10, 18, 25]


@pytest.mark.parametrize("entrance", ["attached", "custom_generate"])
@pytest.mark.parametrize("mode", MODES)
def test_text_iterator_streamer_in_a_thread(mode: str, entrance: str) -> None:
    model, tokenizer, inputs = attached_model(), tiny_tokenizer(), prompt()
    stock = run(model, inputs, **MODES[mode])
    spec = doubting(stock.ids, inputs)
    name = "assistant" if entrance == "attached" else "custom_generate"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(run(model, inputs, streamer=streamer, **{name: spec}, **MODES[mode]).ids)

    thread = threading.Thread(target=work)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert_same_ids(results[0], stock.ids)
    assert "".join(pieces) == tokenizer.decode(stock.ids[0, NUM_COLUMNS:])
    assert len(pieces) > 3


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["drafted", "plain"])
def test_at_the_end_the_statistics_are_those_of_the_call(options: dict[str, Any]) -> None:
    class Reader(Recorder):
        def end(self) -> None:
            super().end()
            self.stats = spec.stats

    spec, streamer = SelfSpec(), Reader()
    run(attached_model(), prompt(), assistant=spec, streamer=streamer, **GREEDY, **options)
    assert streamer.stats.num_new_tokens == len(streamer.told) - 2  # The prompt, and the end.
    assert (streamer.stats.disabled_reason is not None) == bool(options)
