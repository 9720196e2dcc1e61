"""HTTP requests to a simulated gateway, in process."""

import asyncio
from collections.abc import Callable

from starlette.types import Message, Scope

from tests.simulation.simulated_gateway import SimulatedGateway
from tests.simulation.world import Violated


def scope_of(method: str, path: str, query: str, secret: str, body: bytes, port: int) -> Scope:
    """Return the ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"authorization", b"Bearer " + secret.encode()),
        ],
        "client": ("127.0.0.1", port),
        "server": ("127.0.0.1", 8484),
    }


class HttpCall:
    """One request with its answer. `is_cut` is set if the gateway ended before the end of the answer."""

    def __init__(
        self,
        method: str,
        path: str,
        query: str = "",
        body: bytes = b"",
        on_piece: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`on_piece` gets each piece of a successful answer's body, and returns whether the client stays."""
        self.method, self.path, self.query, self.request_body = method, path, query, body
        self.status = 0
        self.body = bytearray()
        self.is_complete = False
        self.has_left = False
        self.violation: Violated | None = None
        self._on_piece = on_piece
        self._has_asked = False
        self._left: asyncio.Future[None] | None = None

    @property
    def is_cut(self) -> bool:
        return not self.is_complete and not self.has_left

    async def run(self, gateway: SimulatedGateway, secret: str, port: int) -> None:
        self._gateway = gateway
        self._left = asyncio.get_running_loop().create_future()
        scope = scope_of(self.method, self.path, self.query, secret, self.request_body, port)
        await gateway.app.entry(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": self.request_body, "more_body": False}
        assert self._left is not None
        await asyncio.shield(self._left)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gateway.is_dead or self.has_left:
            return
        if self.is_complete:
            raise Violated(f"{self.method} {self.path}: {message['type']} after the end of the answer")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        data = message.get("body", b"")
        self.is_complete = not message.get("more_body", False)
        if self.status == 200 and self._on_piece is not None:
            try:
                stays = self._on_piece(data)
            except Violated as error:
                # The app turns what `send` raises into an answer with status 500.
                self.violation = error
                raise
            if not stays and not self.is_complete:
                self.has_left = True
                assert self._left is not None
                if not self._left.done():
                    self._left.set_result(None)
        else:
            self.body += data
        await asyncio.sleep(0)
