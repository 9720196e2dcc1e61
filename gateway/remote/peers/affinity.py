"""Prefix affinity: the places (this daemon or a peer) to which the beginning of a prompt was sent before.

The gateway has no tokenizer, so prefixes are identified by a chain of hashes over the tools and each message. The place
to which the longest prefix was sent probably has the largest part of the prompt in its prefix cache.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from protocol.codec import BYTES_PER_TOKEN, UNREADABLE

KEYS_MAX: Final = 50_000
# A prefix that no request has used for this time expires, because caches have probably evicted it.
EXPIRY_S: Final = 3600.0
# Only the first BYTES_MAX of a prompt are hashed. Text and token ids are cut into pieces of PIECE_BYTES.
BYTES_MAX: Final = 1 << 20
PIECE_BYTES: Final = 2048
DIGEST_BYTES: Final = 12
# msgpack's longer lists have a header of this size with their length. It is skipped, as it is no part of a prefix.
_HEADER_BYTES: Final = {0xDC: 3, 0xDD: 5}


class _Chat(msgspec.Struct, frozen=True, array_like=True, tag=1):
    messages: list[msgspec.Raw]
    tools: list[msgspec.Raw] = []


class _Text(msgspec.Struct, frozen=True, array_like=True, tag=2):
    text: str


class _Tokens(msgspec.Struct, frozen=True, array_like=True, tag=3):
    ids: msgspec.Raw


_prompts: Final[msgspec.msgpack.Decoder[_Chat | _Text | _Tokens]] = msgspec.msgpack.Decoder(_Chat | _Text | _Tokens)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a prompt: its key, and its estimated number of tokens."""

    key: bytes
    tokens: float


def prefixes_of(prompt: msgspec.Raw, *scope: str) -> list[Prefix]:
    """Return the prefixes of an encoded prompt, the shortest first. Their keys depend on `scope`."""
    try:
        decoded = _prompts.decode(prompt)
    except UNREADABLE:  # Only chats, texts and token ids have prefixes.
        return []
    chain = hashlib.blake2b("\0".join(scope).encode(), digest_size=DIGEST_BYTES)
    size, prefixes = 0, list[Prefix]()
    for piece in _pieces(decoded):
        chain.update(len(piece).to_bytes(8, "big"))
        chain.update(piece)
        size += len(piece)
        prefixes.append(Prefix(chain.digest(), size / BYTES_PER_TOKEN))
        if size >= BYTES_MAX:
            break
    return prefixes


def _pieces(prompt: _Chat | _Text | _Tokens) -> Iterator[Any]:
    match prompt:
        case _Chat(messages, tools):
            if tools:
                yield b"".join(bytes(tool) for tool in tools)
            for message in messages:
                yield memoryview(message)
        case _Text(text):
            yield from _cut(text.encode())
        case _Tokens(ids):
            encoded = bytes(ids)
            yield from _cut(encoded[_HEADER_BYTES.get(encoded[0], 1) :])


def _cut(data: bytes) -> Iterator[bytes]:
    """Cut `data` into pieces of equal size. The rest is left out, so that a longer prompt has the same pieces."""
    for at in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


class Affinity:
    """Remembers to which places prefixes were sent, for the newest `KEYS_MAX` prefixes. The fleet owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def note(self, prefixes: Sequence[Prefix], place: str) -> None:
        """Record that a prompt with these prefixes is sent to `place`."""
        now = self._clock()
        for prefix in prefixes:
            self._places.setdefault(prefix.key, {})[place] = now
            self._places.move_to_end(prefix.key)
        while len(self._places) > KEYS_MAX:
            self._places.popitem(last=False)

    def warm(self, prefixes: Sequence[Prefix]) -> dict[str, float]:
        """Estimate for each place how many tokens of the prompt it has cached."""
        now, warm = self._clock(), dict[str, float]()
        for prefix in prefixes:
            places = self._places.get(prefix.key)
            if places is None:
                break
            warm |= {place: prefix.tokens for place, at in places.items() if now - at < EXPIRY_S}
        return warm

    def forget(self, place: str) -> None:
        """Forget a place that has restarted, whose prefix cache in memory is empty."""
        for places in self._places.values():
            places.pop(place, None)
