"""Both ends of the sockets, for tests that are one of them."""

from pathlib import Path
from typing import Any, Self

import zmq

from protocol import sockets
from tests.support.scale import patient

TIMEOUT_MS = 20_000


class Wire:
    """Opens the protocol's sockets below one folder and closes them at the end of `with`."""

    def __init__(self, run_dir: Path) -> None:
        self.down, self.up = sockets.addresses(run_dir)
        self._context: zmq.Context[Any] = zmq.Context()
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()

    def router(self) -> Any:
        return self._keep(sockets.bind_router(self._context, self.down))

    def pull(self) -> Any:
        return self._keep(sockets.bind_pull(self._context, self.up))

    def dealer(self, identity: bytes) -> Any:
        return self._keep(sockets.connect_dealer(self._context, self.down, identity))

    def push(self) -> Any:
        return self._keep(sockets.connect_push(self._context, self.up))

    def _keep(self, socket: Any) -> Any:
        socket.setsockopt(zmq.SNDTIMEO, int(patient(TIMEOUT_MS)))
        self._open.append(socket)
        return socket
