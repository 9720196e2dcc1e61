"""Vectors or scores of a request. A generation computes them, and they are sent as one answer."""

import base64
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Send

from gateway.api.common.serve import PreparedRequest
from gateway.http.exchange import send_body
from gateway.http.sse import cut_off, folded
from gateway.request.record import Header
from protocol.from_worker import Delta


@dataclass(frozen=True, slots=True)
class Vectors:
    """Numbers of an answer. `data` has `count` rows of equal length, in float32, little-endian."""

    data: bytes
    count: int
    prompt_tokens: int
    headers: list[Header]
    cached_tokens: int = 0

    @property
    def dimensions(self) -> int:
        return len(self.data) // 4 // self.count

    def base64(self, row: int) -> str:
        """Return a row in the base64 encoding that OpenAI's SDK reads."""
        return base64.b64encode(self._row(row)).decode("ascii")

    def numbers(self, row: int) -> list[float]:
        numbers = array("f", self._row(row))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def _row(self, row: int) -> bytes:
        size = 4 * self.dimensions
        return self.data[row * size : (row + 1) * size]


class VectorFold:
    """`Fold` that collects the numbers of a request."""

    def __init__(self) -> None:
        self.data = b""
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def bind(self, rids: Sequence[int]) -> None:
        """Ignore the request ids, because a request has only one."""

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.data += delta.data
            if delta.usage is not None:
                self.prompt_tokens, self.cached_tokens = delta.usage.prompt, delta.usage.cached

    def result(self) -> bytes:
        return self.data


async def respond_vectors(
    job: PreparedRequest, count: int, render: Callable[[Vectors], bytes], receive: Receive, send: Send
) -> None:
    """Answer with the numbers, encoded by `render`. If there are many, the thread for large bodies encodes them."""
    fold = VectorFold()
    async with cut_off(job.record, receive):
        with job.generation(fold.bind) as generation:
            data = await folded(generation, fold)
            vectors = Vectors(data, count, fold.prompt_tokens, generation.headers, fold.cached_tokens)
        body = await job.services.bodies.work(len(vectors.data), render, vectors)
        await send_body(send, 200, body, vectors.headers)
