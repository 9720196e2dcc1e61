"""Guard of a CURVE socket: the public keys that may connect, and the key that a frame came by."""

from collections.abc import Callable, Collection
from typing import Any

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85


class AllowedKeys:
    """The public keys that may connect, as ZAP asks for them at each handshake."""

    def __init__(self, keys: Callable[[], Collection[str]], on_refusal: Callable[[str], None]) -> None:
        self._keys = keys
        self._on_refusal = on_refusal

    def callback(self, domain: str, key: bytes) -> bool:
        """Named by pyzmq's authenticators, which call it."""
        public = z85.decode(key).hex()
        is_admitted = public in self._keys()
        if not is_admitted:
            self._on_refusal(public)
        return is_admitted


def guard(context: "zmq.Context[Any]", admitted: AllowedKeys) -> AsyncioAuthenticator:
    """Ask `admitted` about each key that connects to a CURVE socket of this context. Before any of them is bound."""
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=admitted)
    return authenticator


def sender(frame: zmq.Frame) -> str:
    """The public key of the connection that a frame came by. Only of a socket that `guard` watches."""
    user = frame.get("User-Id")
    assert isinstance(user, str), "a CURVE socket knows who sends"
    return z85.decode(user.encode()).hex()
