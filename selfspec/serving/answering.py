"""The thread that owns the model: it lets a session step, and tells each client its tokens.

Everything else runs in the event loop, which hands tickets over and takes news back. Knows nothing
of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

from selfspec.batch import Answer
from selfspec.batch.pace import ReadingPace
from selfspec.batch.session import Session
from selfspec.batch.ticket import Ticket
from selfspec.errors import SelfSpecError
from selfspec.plugin.spec import SelfSpec
from selfspec.serving.refusal import Refused

_log = logging.getLogger("selfspec")

# New tokens of a text, its answer, or why there is none.
News = list[int] | Answer | Exception
Hear = Callable[[News], object]


def _stopping() -> Refused:
    return Refused("the server is being stopped", status=503, code="stopping")


class Answering:
    """Answers any number of tickets at once, at most `max_rows` in the same step.

    `max_memory` bounds the keys and values. At most `max_waiting` texts wait. Its methods are for
    the event loop, but for `start`, which waits until the model was tried out, and `join`.
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
        self.tokenizer = tokenizer
        self.spec = spec
        self.max_memory = max_memory
        self._max_rows = max_rows
        self._max_open = max_rows + max_waiting
        self._indices = count()
        self._clients: dict[int, Hear] = {}  # Each hands news over to its event loop.
        self._gone: set[int] = set()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.is_stopping = False  # Then new requests are refused.
        self._has_ended = False
        self._session = self._new_session()
        self._earlier_reasons: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="selfspec model", daemon=True)
        self._is_open = threading.Event()
        self._problem: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """How many texts wait for a row."""
        return max(len(self._clients) - self._session.num_running, 0)

    @property
    def num_running(self) -> int:
        """How many texts are being written."""
        return self._session.num_running

    @property
    def kv_bytes(self) -> int:
        """What the keys and values of all rows take."""
        return self._session.kv_bytes_in_use

    @property
    def alone_reasons(self) -> Counter[str]:
        """How many texts were written alone, by reason."""
        return self._earlier_reasons + self._session.alone_reasons

    def start(self) -> None:
        """Starts the thread; returns when it can answer. Raises the error if it can't."""
        self._thread.start()
        self._is_open.wait()
        if self._problem is not None:
            raise self._problem

    def check_open(self, num_more: int = 1) -> None:
        """Refuses `num_more` texts if too many wait already, or if the server is ending."""
        if self.is_stopping:
            raise _stopping()
        if len(self._clients) + num_more > self._max_open:
            raise Refused(
                f"at most {self._max_open} texts may be written or wait at a time; ask again later",
                status=503,
                code="overloaded",
            )

    def ticket(self, ids: Sequence[int], seed: int, arguments: dict[str, Any]) -> Ticket:
        """The call of a prompt; may be called in any thread that ends soon."""
        return self._session.ticket(next(self._indices), ids, seed, arguments)

    def submit(self, ticket: Ticket, hear: Hear) -> None:
        """Lets a ticket wait for its answer. `hear` gets its tokens, and at last the answer."""
        tell = asyncio.get_running_loop().call_soon_threadsafe
        self._clients[ticket.index] = lambda news: tell(hear, news)
        self._inbox.put(partial(self._add, ticket))

    def cancel(self, index: int) -> None:
        """Forgets a text that nobody reads any more, within a step."""
        if self._clients.pop(index, None) is not None:
            self._gone.add(index)
            self._inbox.put(partial(self._forget, index))

    def stop_taking(self) -> None:
        """Refuses new requests from now on; those that wait for a row are told so."""
        self.is_stopping = True
        self._inbox.put(self._break_off_waiting)

    def break_off(self) -> None:
        """Ends all texts where they stand."""
        self.is_stopping = True
        self._gone.update(self._clients)  # A text that is written alone looks only there.
        self._inbox.put(partial(self._fail_all, _stopping()))

    def join(self, timeout: float | None = None) -> None:
        """Ends the thread, as soon as its present step is done."""
        self.is_stopping = True
        self._inbox.put(self._end)
        self._thread.join(timeout)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._session.open()
        except BaseException as error:
            self._problem = error
            return
        finally:
            self._is_open.set()
        try:
            self._work()
        except BaseException:
            _log.exception("the thread of the model ended, and no request is answered any more")
            self.is_stopping = True
            for index in list(self._clients):
                self._tell(index, _stopping())

    def _work(self) -> None:
        while not self._has_ended:
            while self._session.is_empty or not self._inbox.empty():
                self._inbox.get()()
                if self._has_ended:
                    return
            self._step()

    def _step(self) -> None:
        try:
            answers = self._session.step()
        except Exception as error:
            self._fail(error)
            return
        for answer in answers:
            self._tell(answer.index, answer)

    def _fail(self, error: Exception) -> None:
        """Tells those whose text broke off; what is written alone takes no others along."""
        if not isinstance(error, SelfSpecError):
            _log.exception("an answer broke off")
        alone = self._session.index_alone
        if alone is None:
            self._fail_all(error)
        else:
            self._session.index_alone = None
            self._tell(alone, error)

    def _hear(self, index: int, ids: Sequence[int]) -> bool:
        """New tokens of a text; False where nobody reads them."""
        if index in self._gone:
            return False
        if ids:
            self._tell(index, list(ids))
        return True

    def _tell(self, index: int, news: News) -> None:
        tell = self._clients.get(index)
        if tell is not None:
            if not isinstance(news, list):
                self._clients.pop(index, None)
            tell(news)

    def _add(self, ticket: Ticket) -> None:
        if ticket.index in self._gone:
            return  # The message that forgets it comes next.
        if self.is_stopping:
            self._tell(ticket.index, _stopping())
            return
        self._session.add(ticket)

    def _forget(self, index: int) -> None:
        self._session.cancel(index)
        self._gone.discard(index)

    def _break_off_waiting(self) -> None:
        for index in self._session.waiting_indices():
            self._session.cancel(index)
            self._tell(index, _stopping())

    def _fail_all(self, error: Exception) -> None:
        """Tells everybody that there is no answer, and begins with an empty session."""
        self._earlier_reasons += self._session.alone_reasons
        self._session = self._new_session()
        self._session.open()
        for index in list(self._clients):
            self._tell(index, error)
            self._gone.discard(index)

    def _end(self) -> None:
        self._has_ended = True

    def _new_session(self) -> Session:
        return Session(
            self.model,
            self.tokenizer,
            self.spec,
            max_rows=self._max_rows,
            max_memory=self.max_memory,
            short_first=True,
            pace=ReadingPace(),
            hear=self._hear,
        )
