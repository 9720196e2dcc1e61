"""CURVE keys for the sockets between the ranks of a group: key pairs, their encoding, and the keys that may connect."""

import re
from collections.abc import Callable, Collection
from typing import Final

import msgspec
import zmq
from zmq.utils import z85

_HEX: Final = re.compile(r"[0-9a-f]{64}")


class KeyPair(msgspec.Struct, frozen=True):
    """Key pair, each key as 64 hexadecimal digits. The secret key alone authenticates a rank."""

    public: str
    secret: str

    def __repr__(self) -> str:
        # The secret key must not appear in logs and tracebacks.
        return f"KeyPair(public={self.public!r})"


def make_pair() -> KeyPair:
    """Generate a key pair from the system's random numbers."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def encoded(key: str) -> bytes:
    """Return a key in the form that libzmq takes. Raises `ValueError`."""
    if _HEX.fullmatch(key) is None:
        raise ValueError("a key is 64 hexadecimal digits")
    return z85.encode(bytes.fromhex(key))


class AllowedKeys:
    """Public keys that may connect, checked by ZAP at each handshake."""

    def __init__(self, keys: Callable[[], Collection[str]], on_refusal: Callable[[str], None]) -> None:
        self._keys = keys
        self._on_refusal = on_refusal

    def callback(self, domain: str, key: bytes) -> bool:
        """Check a key. pyzmq's authenticators require this method name."""
        public = z85.decode(key).hex()
        is_admitted = public in self._keys()
        if not is_admitted:
            self._on_refusal(public)
        return is_admitted
