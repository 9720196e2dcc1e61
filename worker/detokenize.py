"""Token ids to text, one at a time, never splitting a character.

The texts of a sequence, concatenated, equal the tokenizer's own decoding of all its ids at once.
"""

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

# A DecodeStream waits while the text ends in U+FFFD. No character needs this many tokens.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """State of one sequence."""

    def add(self, token: int) -> str:
        """Text that became complete with this token; may be empty."""
        ...

    def finish(self) -> str:
        """What is left: an incomplete character becomes U+FFFD."""
        ...


class Vocabulary:
    """What one tokenizer's ids mean; makes a `Detokenizer` for each sequence.

    `hidden` ids (control tokens such as `<|im_start|>`) have no text.
    """

    def __init__(self, tokenizer: Any, visible: frozenset[str] = frozenset()) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        self.hidden = frozenset(
            token
            for token, entry in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if entry.special and entry.content not in visible
        )
        self._table = self._byte_table() if self._is_byte_level() else None

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for text that follows `context`, whose end decides about leading spaces."""
        if self._table is not None:
            return _ByteLevel(self._table)
        if self._backend is not None:
            return _Stream(self._backend, context, self.hidden)
        return _Wrapped(self._tokenizer.detokenizer, self.hidden)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself, as logprobs report them."""
        if self._table is not None and token not in self.hidden:
            return self._table[token] if token < len(self._table) else b""
        return str(self._tokenizer.decode([token])).encode()

    def decode(self, ids: Sequence[int]) -> str:
        """All of `ids` as text, hidden ones included."""
        return str(self._tokenizer.decode(list(ids)))

    def _is_byte_level(self) -> bool:
        if self._backend is None:
            return False
        decoder = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder is not None else {}
        while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return bool(decoder.get("type") == "ByteLevel")

    def _byte_table(self) -> list[bytes]:
        alphabet = _byte_alphabet()
        size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # type: ignore[union-attr]
        table = [b""] * size
        for text, token in self._backend.get_vocab(with_added_tokens=True).items():  # type: ignore[union-attr]
            if token not in self.hidden:
                table[token] = _to_bytes(text, alphabet)
        return table


def _to_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A byte-level token's bytes; a token with a character outside of the alphabet stands for itself."""
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py, `bytes_to_unicode`), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


class _ByteLevel:
    __slots__ = ("_decode", "_table")

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token: int) -> str:
        # Model vocabularies are often padded beyond the tokenizer's: such ids have no text.
        return self._decode(self._table[token]) if token < len(self._table) else ""

    def finish(self) -> str:
        return self._decode(b"", True)


class _Stream:
    """tokenizers' own incremental decoder, for SentencePiece-style and unusual decoders."""

    __slots__ = ("_backend", "_context", "_held", "_hidden", "_stream")

    def __init__(self, backend: Any, context: Sequence[int], hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._context = list(context[-_MAX_HELD_TOKENS:])
        self._held: list[int] = []
        self._stream = self._restart()

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        text = self._stream.step(self._backend, token)
        self._held.append(token)
        if text is None and len(self._held) <= _MAX_HELD_TOKENS:
            return ""
        if text is None:
            return self.finish()
        self._context, self._held = [*self._context, *self._held][-_MAX_HELD_TOKENS:], []
        return str(text)

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._backend.decode(self._context, skip_special_tokens=False)
        after = self._backend.decode([*self._context, *self._held], skip_special_tokens=False)
        self._context, self._held = [*self._context, *self._held][-_MAX_HELD_TOKENS:], []
        self._stream = self._restart()
        return str(after[len(before) :])

    def _restart(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=False)


class _Wrapped:
    """mlx-lm's detokenizer, for tokenizers without a `tokenizers` backend."""

    __slots__ = ("_hidden", "_inner")

    def __init__(self, inner: Any, hidden: frozenset[int]) -> None:
        self._inner = inner
        self._hidden = hidden

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._inner.add_token(token)
        return str(self._inner.last_segment)

    def finish(self) -> str:
        self._inner.finalize()
        return str(self._inner.last_segment)
