"""CURVE keys of sockets between machines: pairs, and their public keys as text."""

import hashlib
import re
from typing import Final

import msgspec
import zmq
from zmq.utils import z85

_HEX: Final = re.compile(r"[0-9a-f]{64}")


class KeyPair(msgspec.Struct, frozen=True):
    """A key pair, each key as 64 hexadecimal digits. The secret one is all that proves to be its node."""

    public: str
    secret: str

    def __repr__(self) -> str:
        # No log and no traceback may show the other half.
        return f"KeyPair(public={self.public!r})"


def make_pair() -> KeyPair:
    """A new pair, from the system's random numbers."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def pair_of(secret: str) -> KeyPair:
    """The pair of a secret key. Raises `ValueError`."""
    return KeyPair(z85.decode(zmq.curve_public(encoded(secret))).hex(), secret)


def is_key(text: str) -> bool:
    """Whether a text is a key, public or secret: 64 hexadecimal digits."""
    return _HEX.fullmatch(text) is not None


def encoded(key: str) -> bytes:
    """A key as libzmq takes it. Raises `ValueError`."""
    if not is_key(key):
        raise ValueError("a key is 64 hexadecimal digits")
    return z85.encode(bytes.fromhex(key))


def fingerprint(public: str) -> str:
    """A digest of a public key, short enough to be compared by eye: eight groups of four digits."""
    digits = hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))
