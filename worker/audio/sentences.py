"""Splitting of a text into groups of sentences, each of which a model speaks in one call."""

import re
from typing import Final

# Matches ends of sentences, with closing quotation marks and brackets; a line break ends one as well. The lookbehind
# anchors at the start of whitespace, as long whitespace would otherwise take quadratic time.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|(?<![^\S\n])[^\S\n]*+\n\s*")
_SPACE: Final = re.compile(r"\s+")


def groups(text: str, least: int, most: int) -> list[str]:
    """Split the text into parts of at most `most` characters, and at least `least` if the text has as many.

    A part ends at the end of a sentence, or between two words of a longer sentence.
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
    for end in _SENTENCE_END.finditer(text):
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
