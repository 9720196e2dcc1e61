"""Sentences of a text, in groups that a model speaks in one go."""

import re
from typing import Final

# Ends of sentences, with the quotation marks and brackets that close there; a line break ends one as well. What is
# before it is looked at from the beginning of the white space, else much of it takes the square of its length.
_END: Final = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|(?<![^\S\n])[^\S\n]*+\n\s*")
_SPACE: Final = re.compile(r"\s+")


def groups(text: str, least: int, most: int) -> list[str]:
    """The text in parts of at least `least` characters, where it has as many, and at most `most`.

    A part ends where a sentence does, or between two words of a longer one.
    """
    parts: list[str] = []
    for sentence in _sentences(text):
        for piece in _cut(sentence, most):
            is_joined = parts and len(parts[-1]) < least and len(parts[-1]) + 1 + len(piece) <= most
            if is_joined:
                parts[-1] = f"{parts[-1]} {piece}"
            else:
                parts.append(piece)
    return parts


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    start = 0
    for end in _END.finditer(text):
        sentences.append(text[start : end.end()])
        start = end.end()
    sentences.append(text[start:])
    return [plain for sentence in sentences if (plain := _SPACE.sub(" ", sentence).strip())]


def _cut(sentence: str, most: int) -> list[str]:
    pieces: list[str] = []
    while len(sentence) > most:
        at = sentence.rfind(" ", 0, most + 1)
        at = at if at > 0 else most
        pieces.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*pieces, sentence] if sentence else pieces
