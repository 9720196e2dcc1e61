"""Guard of a CURVE socket: the public keys that may connect."""

from collections.abc import Callable, Collection

from zmq.utils import z85


class AllowedKeys:
    """Public keys that may connect, checked by ZAP at each handshake."""

    def __init__(self, keys: Callable[[], Collection[str]], on_refusal: Callable[[str], None]) -> None:
        self._keys = keys
        self._on_refusal = on_refusal

    def callback(self, domain: str, key: bytes) -> bool:
        """Check a key; pyzmq's authenticators require this name."""
        public = z85.decode(key).hex()
        is_admitted = public in self._keys()
        if not is_admitted:
            self._on_refusal(public)
        return is_admitted
