"""Stored answers that many clients may read concurrently. There is one copy of each, in the memory for bodies."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from gateway.errors import ApiError
from gateway.http.exchange import SLICE_BYTES
from gateway.http.request_body import reserve
from gateway.request.body_memory import Bodies, BodyLease
from gateway.request.record import RequestRecord

# A reader has one slice, and two more are buffered by its transport, whose high-water mark is one slice.
READER_BYTES: Final = 3 * SLICE_BYTES


@dataclass(slots=True)
class _SharedAnswer:
    """One answer. Its first reader makes it."""

    lease: BodyLease
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    readers: int = 0
    body: bytes | None = None
    failure: ApiError | None = None


class SharedAnswers:
    """Registry of the answers that are being read.

    An answer is made once for all its readers, and its memory is leased while it has any reader. Each reader leases
    memory for its slices with its request, so the memory for bodies and the share of the reader's key bound the number
    of readers. Used on the event loop only.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._answers: dict[Hashable, _SharedAnswer] = {}

    @asynccontextmanager
    async def reading(
        self, record: RequestRecord, key: Hashable, size_bytes: int, make: Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes]:
        """Yield the answer with this key, which takes about `size_bytes`. Answers with equal keys must have equal
        bytes.

        Raises `Unavailable` if there is no memory, and any error of `make`.
        """
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _SharedAnswer(self._bodies.lease())
            answer.lease.owner = record.caller.key or ""
        answer.readers += 1
        try:
            body = await self._body(answer, size_bytes, make)
            await reserve(record, min(len(body), READER_BYTES))
            yield body
        finally:
            answer.readers -= 1
            if not answer.readers:
                del self._answers[key]
                answer.lease.close()

    async def _body(self, answer: _SharedAnswer, size_bytes: int, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer, which the first reader makes. If that reader's client leaves meanwhile, the next reader
        makes it.

        If making it fails, all waiting readers get the same error.
        """
        async with answer.lock:
            if answer.failure is not None:
                raise answer.failure
            if answer.body is None:
                try:
                    await self._reach(answer.lease, size_bytes)
                    answer.body = await make()
                    await self._reach(answer.lease, len(answer.body))
                except ApiError as error:
                    answer.body, answer.failure = None, error
                    raise
            return answer.body

    async def _reach(self, lease: BodyLease, size_bytes: int) -> None:
        # An answer may be larger than all memory for bodies, because it includes more than its request. It is sent
        # nevertheless.
        await lease.reach(min(size_bytes, self._bodies.largest_bytes()))
