"""What one request may take from the others: a body of a size, time for it, and threads.

Knows HTTP as ASGI has it, and neither models nor fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from selfspec.serving.fields import RequestError

T = TypeVar("T")

GONE = 499  # nginx counts requests whose client has gone under this status.
_BODY_SECONDS = 60.0  # A body must be complete by then.


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The body of a request, which is refused once it is too large or takes too long."""

    async def read() -> bytes:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                rule = f"the body must have at most {max_bytes} bytes (got more)"
                raise RequestError(rule, status=413)
        return bytes(data)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        rule = f"the body must be complete within {_BODY_SECONDS:.0f} seconds (got a part)"
        raise RequestError(rule, status=408) from None
    except ClientDisconnect:
        raise _gone() from None


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which ends as soon as the client has gone. Its body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _gone()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def in_thread(turn: asyncio.Lock, work: Callable[[], T]) -> T:
    """What some work gives, in its turn, in a thread of its own that ends with it.

    A thread that stayed would keep OpenMP threads, and more of these than cores slow down all
    answers. Who is cancelled gives the turn back when the thread has ended, and not before.
    """
    async with turn:
        executor = ThreadPoolExecutor(1, thread_name_prefix="selfspec request")
        waiting = asyncio.wrap_future(executor.submit(work))
        executor.shutdown(wait=False)
        try:
            return await asyncio.shield(waiting)
        finally:
            await asyncio.wait({waiting})
            waiting.exception()  # It is told to whoever is still there.


def _gone() -> RequestError:
    return RequestError("the client has gone", status=GONE)
