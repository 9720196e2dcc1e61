"""`context` of a completion: the conversation as integers, which a client sends back without reading them.

Ollama's own integers are token ids. These contain the turns as JSON, three bytes per integer, so that any worker can
continue, with or without its cache, and the chat template renders the turns like all others.
"""

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.errors import BadRequest

# This mark is larger than any token id of Ollama's own contexts.
MARK: Final = 0x6D6C7864
# Some clients use signed 32-bit integers, into which three bytes fit.
_WIDTH: Final = 3
_WORD: Final = 1 << (8 * _WIDTH)
# Each integer is packed into this many bytes.
_BYTES: Final = 4


class ConversationTurn(Struct, frozen=True, array_like=True):
    """One turn, without its images."""

    role: Literal["system", "user", "assistant"]
    text: str


_turns: Final = msgspec.json.Decoder(list[ConversationTurn])


def write_context(turns: Sequence[ConversationTurn]) -> list[int]:
    """Encode turns as integers: the mark, the length in bytes, and the bytes."""
    data = msgspec.json.encode(turns)
    count = len(data) // _WIDTH
    whole = count * _WIDTH
    # There may be a million integers. Slice assignments avoid a Python step for each of them.
    words = bytearray(count * _BYTES)
    for at in range(_WIDTH):
        words[_WIDTH - 1 - at :: _BYTES] = data[at:whole:_WIDTH]
    end = [int.from_bytes(data[whole:], "big")] if whole < len(data) else []
    return [MARK, len(data), *struct.unpack(f"<{count}I", words), *end]


def read_context(numbers: Sequence[int]) -> list[ConversationTurn]:
    """Decode the turns that `write_context` has encoded. Raises `BadRequest`."""
    if not numbers:
        return []
    if len(numbers) < 2 or numbers[0] != MARK or min(numbers) < 0 or max(numbers[1:]) >= _WORD:
        raise _foreign()
    size, words = numbers[1], numbers[2:]
    count, width = divmod(size, _WIDTH)
    if len(words) != count + bool(width) or (width and words[-1] >= 1 << (8 * width)):
        raise _foreign()
    packed = struct.pack(f"<{count}I", *words[:count])
    data = bytearray(count * _WIDTH)
    for at in range(_WIDTH):
        data[at::_WIDTH] = packed[_WIDTH - 1 - at :: _BYTES]
    if width:
        data += words[-1].to_bytes(width, "big")
    try:
        return _turns.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _foreign() from None


def _foreign() -> BadRequest:
    message = "'context' is none that this server has sent. Leave it out, or send the conversation to /api/chat."
    return BadRequest(message, "context", "invalid_value")
