"""The thread of the model, without HTTP: who hears what, also of texts that are written alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from selfspec import SelfSpec, UnsupportedError
from selfspec.batch import Answer
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.schema import RequestError
from tests.fakes import tiny_model, tiny_tokenizer

ENDLESS = {"max_new_tokens": 5000, "do_sample": False}


class Heard:
    """The news of one text."""

    def __init__(self, thread: ModelThread, **arguments: Any) -> None:
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.ticket = thread.ticket([5, 6, 7], 0, arguments)
        thread.submit(self.ticket, self.news.put_nowait)

    async def last(self) -> Any:
        while isinstance(news := await self.news.get(), list):
            pass
        return news


def play(name: str, work: Callable[[ModelThread], Awaitable[None]], **knobs: Any) -> ModelThread:
    """Lets clients talk to a new thread of a model."""
    spec = SelfSpec(**knobs)
    thread = ModelThread(tiny_model(name), tiny_tokenizer(), spec, max_rows=2, max_waiting=3)
    thread.start()
    try:
        asyncio.run(asyncio.wait_for(work(thread), 60))
    finally:
        thread.join(30)
    return thread


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_text_is_left_and_another_one_broken_off(name: str) -> None:
    async def work(thread: ModelThread) -> None:
        left = Heard(thread, **ENDLESS)
        assert isinstance(await left.news.get(), list)
        thread.cancel(left.ticket.index)
        short = Heard(thread, max_new_tokens=4)
        answer = await short.last()
        assert isinstance(answer, Answer)
        assert len(answer.ids) == 4
        await until(lambda: thread.session.num_running == 0)
        long = Heard(thread, **ENDLESS)
        assert isinstance(await long.news.get(), list)
        thread.break_off()
        error = await long.last()
        assert isinstance(error, RequestError)
        assert error.status == 503
        with pytest.raises(RequestError, match="being stopped"):
            thread.check_open()

    thread = play(name, work)
    assert bool(thread.session.alone_reasons) == (name == "bloom")
    assert thread.num_waiting == 0


def test_what_fails_alone_takes_no_others_along() -> None:
    async def work(thread: ModelThread) -> None:
        running = Heard(thread, max_new_tokens=30)
        failing = Heard(thread, max_new_tokens=3, logits_processor=[Failing()])
        assert isinstance(await running.last(), Answer)
        error = await failing.last()
        assert isinstance(error, RequestError)
        assert "no such luck" in str(error)
        assert isinstance(await Heard(thread, max_new_tokens=3).last(), Answer)

    thread = play("llama", work)
    assert list(thread.session.alone_reasons) == ["a logits processor may look at other rows"]


class Failing:
    """A logits processor."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        raise UnsupportedError("no such luck")


def test_when_nothing_can_be_answered_any_more_everybody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a GPU is lost: the step fails, and so does whatever begins anew."""

    def fail(*_given: Any) -> None:
        raise RuntimeError("the device is lost")

    async def work(thread: ModelThread) -> None:
        monkeypatch.setattr(thread.session, "step", fail)
        monkeypatch.setattr(thread, "_new_session", fail)
        error = await Heard(thread, max_new_tokens=3).last()
        assert isinstance(error, RequestError)
        assert thread.is_stopping

    play("llama", work)
    assert "no request is answered any more" in caplog.text


def test_a_model_that_can_not_be_tried_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SelfSpec, model: Any) -> None:
        raise UnsupportedError("not this one")

    monkeypatch.setattr(SelfSpec, "ability", fail)
    thread = ModelThread(tiny_model(), tiny_tokenizer(), SelfSpec())
    with pytest.raises(UnsupportedError, match="not this one"):
        thread.start()
