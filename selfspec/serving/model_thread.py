"""The thread that owns the model. It runs the steps of a session and tells clients of their texts.

Everything else runs in the event loop, which hands calls over and gets events back. Knows nothing
of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from typing import Any

from selfspec.batch import Answer
from selfspec.batch.prompt_maker import PromptInputs, PromptMaker
from selfspec.errors import SelfSpecError
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Prompt
from selfspec.serving.fields import RequestError
from selfspec.session import ReadingPace, Session

_log = logging.getLogger("selfspec")

# What came of the new tokens of a text, or its complete `Answer`, with its index. An error is for
# all texts, as where the server is being stopped.
Event = tuple[int, Any]


def _stopping() -> RequestError:
    return RequestError("the server is being stopped", status=503, code="stopping")


class ModelThread:
    """Answers any number of calls at once, at most `max_rows` in the same step.

    `max_memory` bounds the keys and values. At most `max_waiting` texts wait. Its methods are for
    the event loop, except `start`, which waits until the model was tried out, and `join`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: SelfSpec,
        *,
        max_rows: int = 16,
        max_memory: int | None = None,
        max_waiting: int = 256,
    ) -> None:
        self.model = model
        self.spec = spec
        self.max_memory = max_memory
        self.is_stopping = False  # True: new requests are refused.
        self._max_texts = max_rows + max_waiting
        self._indices = count()
        # By the index of a text: what hands its events to the event loop of its client.
        self._clients: dict[int, Callable[[Event], object]] = {}
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.maker = PromptMaker(model, tokenizer, spec)
        self.session = Session(
            spec.runner(model),
            spec,
            max_rows=max_rows,
            max_memory=max_memory,
            pace=ReadingPace(),
            keeps_kv=True,
        )
        self._thread = threading.Thread(target=self._run, name="selfspec model", daemon=True)
        self._is_open: Future[None] = Future()

    @property
    def num_waiting(self) -> int:
        return max(len(self._clients) - self.session.num_running, 0)

    def start(self) -> None:
        """Starts the thread; returns when it can answer. Raises the error if it can't."""
        self._thread.start()
        self._is_open.result()

    def enter(self, number: int) -> tuple[list[int], asyncio.Queue[Event]]:
        """Gives the texts of a request their places in the line, or refuses them.

        Returns their indices, and what gets their events. Nothing later checks whether there are
        places, so all indices must be forgotten in the end.
        """
        if self.is_stopping:
            raise _stopping()
        if len(self._clients) + number > self._max_texts:
            rule = f"at most {self._max_texts} texts may be written or wait at a time"
            raise RequestError(f"{rule}; ask again later", status=503, code="overloaded")
        queue: asyncio.Queue[Event] = asyncio.Queue()
        soon = asyncio.get_running_loop().call_soon_threadsafe
        indices = list(islice(self._indices, number))
        self._clients |= dict.fromkeys(indices, lambda event: soon(queue.put_nowait, event))
        return indices, queue

    def prompt(
        self,
        index: int,
        inputs: PromptInputs,
        seed: int,
        arguments: Any,
        scope: Hashable,
        decode: Callable[[Sequence[int]], Any],
    ) -> Prompt:
        """A prompt for `add`; any thread may ask. Refuses what can never be answered.

        `decode` makes of new tokens what the client gets, or nothing, in the thread of the model.
        """

        def on_tokens(ids: Sequence[int]) -> bool:
            if pieces := decode(ids):
                self._send(index, pieces)
            return index in self._clients

        prompt = self.maker.prompt(index, inputs, seed, arguments, scope, on_tokens)
        self.session.memory.check(prompt)
        return prompt

    def add(self, prompt: Prompt) -> None:
        self._inbox.put(partial(self.session.add, prompt))

    def forget(self, index: int) -> None:
        """Drops a text within a step, if it is not complete."""
        if self._clients.pop(index, None) is not None:
            self._inbox.put(lambda: self.session.cancel(index))

    def break_off(self) -> None:
        self.is_stopping = True
        for index, send in list(self._clients.items()):
            send((index, _stopping()))
            self.forget(index)

    def join(self, timeout: float | None = None) -> None:
        """Ends the thread, as soon as its present step is done."""
        self.break_off()
        self._inbox.put(None)
        self._thread.join(timeout)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self.session.open()
            self.maker.prompt(0, [0], 0, {"max_new_tokens": 1})  # No later one is the first.
        except BaseException as error:
            self._is_open.set_exception(error)
            return
        self._is_open.set_result(None)
        try:
            self._work()
        except BaseException:
            _log.exception("the thread of the model ended, and no request is answered any more")
            self.break_off()

    def _work(self) -> None:
        while True:
            while self.session.is_empty or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    return
                message()
            for answer in map(Answer.to, self.session.step()):  # Replies have the texts.
                if answer.error is not None and not isinstance(answer.error, SelfSpecError):
                    _log.error("an answer broke off", exc_info=answer.error)
                self._send(answer.index, answer)

    def _send(self, index: int, value: Any) -> None:
        """Hands something to the client of a text. An answer is the last that it gets."""
        clients = self._clients
        send = clients.pop(index, None) if isinstance(value, Answer) else clients.get(index)
        if send is not None:
            send((index, value))
