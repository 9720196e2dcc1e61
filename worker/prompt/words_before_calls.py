"""Text beside calls, for templates that drop it and take no separate message for it, such as Mistral's.

The template renders a mark in the name of the first call, and the text then replaces the mark, before the markup that
opens the call. That is where the model itself has written the text.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from jinja2.exceptions import TemplateError

from worker.prompt.contents import words
from worker.prompt.rewrites import Messages

_MARK: Final = "words_beside_call_"


def marked(messages: Messages) -> tuple[Messages, list[str]]:
    """Move each text beside calls out of its message. Return the messages, with marks, and the texts."""
    texts: list[str] = []
    shown: Messages = []
    for message in messages:
        if message.get("tool_calls") and words(message.get("content")):
            first, *others = message["tool_calls"]
            name = f"{_MARK}{len(texts)}_{first['function']['name']}"
            texts.append(words(message["content"]))
            first = {**first, "function": {**first["function"], "name": name}}
            message = {**message, "content": "", "tool_calls": [first, *others]}
        shown.append(message)
    return shown, texts


def with_words(rendered: str, opening: str, texts: Sequence[str]) -> str:
    """Replace the marks by the texts, before the `opening` of their calls. Raises `TemplateError`."""
    found: list[int] = []

    def opened(mark: re.Match[str]) -> str:
        found.append(int(mark[1]))
        return texts[found[-1]] + opening if found[-1] < len(texts) else ""

    text = re.sub(re.escape(opening + _MARK) + r"(\d+)_", opened, rendered) if texts else rendered
    if found != list(range(len(texts))):
        raise TemplateError("it does not keep each text beside its calls")
    return text


def opening_of(calling: str, saying: str, name: str) -> str:
    """Return the markup before the name of a call: what follows the common beginning of two renderings, of a turn with
    a call and of one with text."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(calling, saying, strict=False)))
    return calling[common:].partition(name)[0]
