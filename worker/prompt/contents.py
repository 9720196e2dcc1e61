"""Contents of messages: text, or a list of text and media in order."""

from collections.abc import Iterable
from typing import Any

Part = dict[str, Any]
Content = str | list[Part] | None


def words(content: Content) -> str:
    """Return the text of a content, without its media."""
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in content if part["type"] == "text")
    return content or ""


def media(content: Content) -> list[Part]:
    """Return the parts of a content that are not text."""
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def parts(content: Content) -> list[Part]:
    """Return a content as a list of parts; empty text gives an empty list."""
    return content if isinstance(content, list) else _text(content or "")


def joined(contents: Iterable[Content], between: str = "\n\n") -> Content:
    """Join contents. The result is text if all are text, otherwise a list in which adjacent texts are merged."""
    contents = list(contents)
    if not any(isinstance(content, list) for content in contents):
        return between.join(words(content) for content in contents)
    result: list[Part] = []
    for index, content in enumerate(contents):
        for part in [*(_text(between) if index else []), *parts(content)]:
            if part["type"] == "text" and result and result[-1]["type"] == "text":
                result[-1] = {"type": "text", "text": result[-1]["text"] + part["text"]}
            else:
                result.append(part)
    return result


def wrapped(before: str, content: Content, after: str) -> Content:
    """Return the content between two texts."""
    return joined((before, content, after), "")


def _text(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []
