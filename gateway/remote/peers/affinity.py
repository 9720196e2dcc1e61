"""Affinity of conversations to places: the places where the beginning of a prompt was sent before.

There is no tokenizer here, so a prompt is known by a chain of hashes: over its tools, then over each message with all
before it. The place where the longest chain was sent has most of the prompt in its prefix cache.
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
# A prefix is forgotten after this long without a request: caches forget as well.
KEPT_S: Final = 3600.0
# So much of a prompt is looked at; of text in pieces of this size.
BYTES_MAX: Final = 1 << 20
PIECE_BYTES: Final = 2048
DIGEST_BYTES: Final = 12
# Of msgpack's longer lists; how many ids follow is none of the prefix.
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
    """One beginning of a prompt: its key, and about how many tokens it has."""

    key: bytes
    tokens: float


def prefixes_of(prompt: msgspec.Raw, *scope: str) -> list[Prefix]:
    """The beginnings of an encoded prompt, the shortest first. Equal ones of another `scope` are others."""
    try:
        decoded = _prompts.decode(prompt)
    except UNREADABLE:  # a kind of prompt that has no prefixes
        return []
    chain = hashlib.blake2b("\0".join(scope).encode(), digest_size=DIGEST_BYTES)
    size, found = 0, list[Prefix]()
    for piece in _pieces(decoded):
        chain.update(len(piece).to_bytes(8, "big"))
        chain.update(piece)
        size += len(piece)
        found.append(Prefix(chain.digest(), size / BYTES_PER_TOKEN))
        if size >= BYTES_MAX:
            break
    return found


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
    """Whole pieces, so that a longer prompt has the same ones."""
    for at in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        yield data[at : at + PIECE_BYTES]


class Affinity:
    """The places to which prefixes were sent, the newest `KEYS_MAX` of them. Owned by the fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def note(self, prefixes: Sequence[Prefix], place: str) -> None:
        """A prompt with these beginnings goes to `place`."""
        now = self._clock()
        for prefix in prefixes:
            self._places.setdefault(prefix.key, {})[place] = now
            self._places.move_to_end(prefix.key)
        while len(self._places) > KEYS_MAX:
            self._places.popitem(last=False)

    def warm(self, prefixes: Sequence[Prefix]) -> dict[str, float]:
        """By place, about how many tokens of the prompt were sent there before."""
        now, warm = self._clock(), dict[str, float]()
        for prefix in prefixes:
            places = self._places.get(prefix.key)
            if places is None:
                break
            warm |= {place: prefix.tokens for place, at in places.items() if now - at < KEPT_S}
        return warm

    def forget(self, place: str) -> None:
        """A place was started again: its memory is empty. What it keeps on disk is found by cost alone."""
        for places in self._places.values():
            places.pop(place, None)
