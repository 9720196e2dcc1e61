"""One of a model's named chat templates renders plain chats, and one chats with tools."""

from typing import Any

import pytest

from protocol.checkpoint import ChatTemplates


@pytest.mark.parametrize(
    ("chat_template", "plain", "with_tools"),
    [
        ("text", "text", "text"),
        ({"rag": "r", "tool_use": "t", "default": "d"}, "d", "t"),
        ({"default": "d", "rag": "r"}, "d", "d"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d", "t"),
        ({"tool_use": "t"}, "t", "t"),
        ({"chatml": "c"}, "c", "c"),
        ({"rag": "r"}, "", ""),
        ({"rag": "r", "tool_use": "t"}, "", "t"),
        ({"one": "1", "two": "2"}, "", ""),
        ([{"name": "default"}, "default", {"template": "x"}, {"name": 1, "template": "x"}], "", ""),
        (None, "", ""),
        (5, "", ""),
    ],
)
def test_a_plain_chat_has_the_default_template_or_the_only_one(chat_template: Any, plain: str, with_tools: str) -> None:
    templates = ChatTemplates.of(chat_template)
    assert (templates.plain, templates.with_tools) == (plain, with_tools)
    assert templates.texts == tuple(dict.fromkeys(text for text in (with_tools, plain) if text))
