"""The short way of a piece of a streamed body: from the callback that heard of it to the socket."""

from typing import Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

KEY: Final = "mlxd.outlet"


class Outlet:
    """What ASGI's `send` does with a piece of a chunked body, as a plain call. Made by the connection's protocol.

    Only while nobody waits in `send`, and after the first piece has gone through it.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_open(self) -> bool:
        """False when a write would have to wait for the client, or it has left: `send` knows what to do then."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, data: bytes) -> None:
        """One chunk, not empty. https://www.rfc-editor.org/rfc/rfc9112#section-7.1"""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def outlet_of(scope: Scope) -> Outlet | None:
    """The connection's outlet; None where the server is not ours."""
    return scope.get(KEY)
