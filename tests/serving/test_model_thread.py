"""The thread of the model, without HTTP: who hears what, also of texts that are written alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from selfspec import SelfSpec
from selfspec.batch import Answer
from selfspec.serving.fields import RequestError
from selfspec.serving.model_thread import ModelThread
from tests.fakes import tiny_model, tiny_tokenizer


async def last(thread: ModelThread, **arguments: Any) -> Any:
    """The answer to a prompt, of which it hears before."""
    async with asked(thread, **arguments) as events:
        *parts, answer = [event async for event in events]
    assert [token for part in parts for token in part] == answer.ids
    return answer


@asynccontextmanager
async def asked(thread: ModelThread, **arguments: Any) -> AsyncIterator[Any]:
    """The events of a text that nobody waits for after it."""
    (index,), queue = thread.enter(1)
    thread.add(thread.prompt(index, [5, 6, 7], 0, arguments, None, list))

    async def events() -> AsyncIterator[Any]:
        event: Any = None
        while not isinstance(event, Answer):
            _index, event = await queue.get()
            if isinstance(event, RequestError):
                raise event
            yield event

    try:
        yield events()
    finally:
        thread.forget(index)


ENDLESS: dict[str, Any] = {"max_new_tokens": 5000, "do_sample": False}


def thread_of(name: str, **options: Any) -> ModelThread:
    options = {"max_rows": 2, "max_waiting": 3, **options}
    return ModelThread(tiny_model(name), tiny_tokenizer(), SelfSpec(), **options)


def play(thread: ModelThread, work: Callable[[ModelThread], Awaitable[None]]) -> ModelThread:
    """Lets clients talk to the thread of a model."""
    thread.start()
    try:
        asyncio.run(asyncio.wait_for(work(thread), 60))
    finally:
        thread.join(30)
    return thread


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_text_is_left_and_another_one_broken_off(name: str) -> None:
    async def work(thread: ModelThread) -> None:
        async with asked(thread, **ENDLESS) as left:
            await anext(left)
        assert len((await last(thread, max_new_tokens=4)).ids) == 4
        while thread.session.num_running:
            await asyncio.sleep(0.005)
        async with asked(thread, **ENDLESS) as broken_off:
            await anext(broken_off)
            thread.break_off()
            with pytest.raises(RequestError, match="being stopped"):
                async for _ in broken_off:
                    pass
        with pytest.raises(RequestError, match="being stopped"):
            thread.enter(1)

    thread = play(thread_of(name), work)
    assert bool(thread.session.alone_reasons) == (name == "bloom")
    assert thread.num_waiting == 0


def test_when_nothing_can_be_answered_any_more_everybody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the session itself is broken, and not a prompt."""

    def fail(*_given: Any) -> None:
        raise RuntimeError("the device is lost")

    async def work(thread: ModelThread) -> None:
        monkeypatch.setattr(thread.session, "step", fail)
        with pytest.raises(RequestError):
            await last(thread, max_new_tokens=3)
        assert thread.is_stopping

    play(thread_of("llama"), work)
    assert "no request is answered any more" in caplog.text
