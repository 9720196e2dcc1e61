"""Incremental detokenizer that never splits a character.

The concatenated texts of a sequence equal the tokenizer's decoding of all its ids at once.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

# DecodeStream holds text that ends in U+FFFD. This is the maximum number of tokens for which it may do so; no character
# needs as many tokens.
_MAX_HELD_TOKENS = 16
_MAX_UTF8_BYTES = 4
# Maximum number of leading spaces to strip. Metaspace strips all leading spaces of the first piece, so this only has to
# be large enough.
_STRIP_ALL_SPACES = 1024
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Detokenizer of one sequence."""

    def add(self, token: int) -> str:
        """Return the text that this token completes, which may be empty."""
        ...

    def finish(self) -> str:
        """Return the rest of the text: an incomplete character becomes U+FFFD."""
        ...


class Vocabulary:
    """Texts of one tokenizer's ids, and factory of each sequence's `Detokenizer`.

    `hidden` ids (control tokens such as `<|im_start|>`) have no text.
    """

    def __init__(self, tokenizer: Any, visible: frozenset[str] = frozenset()) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        # Names and ids of hidden tokens.
        self.hidden_names: dict[str, int] = {
            entry.content: token for token, entry in added.items() if entry.special and entry.content not in visible
        }
        self.hidden = frozenset(self.hidden_names.values())
        self._spaces_stripped = 0
        self._table = self._byte_table() or self._piece_table()

    @cached_property
    def with_special(self) -> "Vocabulary":
        """The same vocabulary with text for all special tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return Vocabulary(self._tokenizer, frozenset(str(entry.content) for entry in added.values()))

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for text after `context`, whose end determines leading spaces.

        If `context` ends inside a character, that character is the first of the text.
        """
        if self._table is not None:
            return _ByteDetokenizer(self._table, 0 if context else self._spaces_stripped, self._begun(context))
        if self._backend is not None:
            return _StreamDetokenizer(self._backend, context, self.hidden)
        return _LibraryDetokenizer(self._tokenizer.detokenizer, self.hidden)

    def _begun(self, context: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the end of `context`."""
        table, end = self._table or [], b""
        for token in reversed(context[-_MAX_UTF8_BYTES:]):
            # A control token has no text, and neither has an id beyond the tokenizer's vocabulary.
            if token >= len(table) or not table[token]:
                break
            end = table[token] + end
        for size in range(1, min(len(end), _MAX_UTF8_BYTES - 1) + 1):
            lead = end[-size]
            if lead & 0xC0 != 0x80:
                return end[-size:] if _length(lead) > size else b""
        return b""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token alone, for logprobs."""
        if self._table is not None and token not in self.hidden:
            return self._table[token] if token < len(self._table) else b""
        return str(self._tokenizer.decode([token])).encode()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode all `ids` to text, including hidden ones."""
        if self._backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", True):
            # The batch call releases the GIL while it works.
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=False)
            return str(text)
        return str(self._tokenizer.decode(list(ids)))

    def _byte_table(self) -> list[bytes] | None:
        """Return each id's bytes if the decoder is purely byte-level; otherwise None."""
        if [step.get("type") for step in self._decoder()] != ["ByteLevel"]:
            return None
        alphabet = _byte_alphabet()
        return self._table_of(lambda piece: _to_bytes(piece, alphabet))

    def _piece_table(self) -> list[bytes] | None:
        """Return each id's bytes for a SentencePiece-style decoder, and set how many leading spaces it strips.

        A table only represents single pieces and the beginning of a text. So it supports a decoder with these steps in
        this order: replacements, bytes, and one fusion that strips at most a space. In other orders, steps depend on
        the results of earlier ones.
        """
        steps = self._decoder()
        replaced = [pair for pair in takewhile(bool, map(_replacement, steps)) if pair is not None]
        has_bytes = {"type": "ByteFallback"} in steps[len(replaced) : len(replaced) + 1]
        match steps[len(replaced) + has_bytes :]:
            case [] | [{"type": "Fuse"}]:
                spaces = 0
            case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0 | 1 as spaces, "stop": 0}]:
                pass
            case [{"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}] if len(steps) == 1:
                replaced, spaces = [(old, " ")], 0 if scheme == "never" else _STRIP_ALL_SPACES
            case _:
                return None
        if not replaced:
            return None
        self._spaces_stripped = spaces
        return self._table_of(lambda piece: _piece_bytes(piece, replaced, has_bytes))

    def _decoder(self) -> list[dict[str, Any]]:
        """Return the steps of the tokenizer's decoder."""
        if self._backend is None or self._backend.decoder is None:
            return []
        decoder = json.loads(self._backend.decoder.__getstate__())
        return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]

    def _table_of(self, to_bytes: Callable[[str], bytes]) -> list[bytes]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)  # type: ignore[union-attr]
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, token in vocabulary.items():
            if token not in self.hidden:
                table[token] = to_bytes(piece)
        return table


def _length(lead: int) -> int:
    """Return the length in bytes of the UTF-8 character that begins with `lead`; 0 if none does."""
    ends = ((0x80, 1), (0xC2, 0), (0xE0, 2), (0xF0, 3), (0xF5, 4))
    return next((length for end, length in ends if lead < end), 0)


def _to_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """Return a byte-level token's bytes; a token with a character outside the alphabet is plain text."""
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:
        return token.encode()


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a step replaces in each piece, and its replacement; None for another type of step."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case _:
            return None


def _piece_bytes(piece: str, replaced: Sequence[tuple[str, str]], has_bytes: bool) -> bytes:
    """Return a SentencePiece piece's bytes: `▁` is a space, and `<0xE2>` is that byte."""
    for old, new in replaced:
        piece = piece.replace(old, new)
    if has_bytes and (named := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(named[1], 16)])
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the inverse of GPT-2's printable substitutes for bytes (openai/gpt-2, encoder.py, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


class _ByteDetokenizer:
    """Detokenizer for tokenizers whose ids each map to bytes. Emitted text never changes, even after invalid bytes."""

    __slots__ = ("_decode", "_spaces", "_table")

    def __init__(self, table: list[bytes], spaces_stripped: int = 0, begun: bytes = b"") -> None:
        self._table = table
        self._spaces = spaces_stripped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(begun)

    def add(self, token: int) -> str:
        # Model vocabularies are often padded beyond the tokenizer's: the extra ids have no text.
        text = self._decode(self._table[token]) if token < len(self._table) else ""
        return self._strip(text) if self._spaces and text else text

    def finish(self) -> str:
        return self._decode(b"", True)

    def _strip(self, text: str) -> str:
        """Strip the spaces that the tokenizer adds before the first word."""
        spaces, self._spaces = self._spaces, 0
        return text[:spaces].lstrip(" ") + text[spaces:]


class _StreamDetokenizer:
    """Detokenizer with tokenizers' own incremental decoder, for decoders that depend on several ids."""

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
        self._held.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # tokenizers raises a plain Exception if an id changes the text of earlier ids
            return self.finish()
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


class _LibraryDetokenizer:
    """Detokenizer of mlx-lm, for tokenizers without a `tokenizers` backend."""

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
