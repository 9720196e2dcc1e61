"""Every spelling of how much to think, and which one wins."""

import json
from itertools import count
from typing import Any

import pytest

from gateway.config import ModelConfig
from gateway.errors import ApiError
from gateway.schemas.lowering import lower_chat
from gateway.schemas.openai import decode_chat
from protocol.messages import ChatPrompt


def wish(**fields: Any) -> tuple[bool | None, str, int | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    request, unknown = decode_chat(json.dumps(body).encode())
    assert not unknown
    [found] = lower_chat(request, ModelConfig(name="m", path="m"), count(1).__next__, 7)
    assert isinstance(found.prompt, ChatPrompt)
    return found.prompt.thinking, found.prompt.effort, found.thinking_budget


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, "", None)),
        ({"enable_thinking": True}, (True, "", None)),
        ({"enable_thinking": False}, (False, "", None)),
        ({"thinking_budget": 100}, (None, "", 100)),
        ({"reasoning_effort": "none"}, (False, "", None)),
        ({"reasoning_effort": "minimal"}, (False, "", None)),
        ({"reasoning_effort": "low"}, (True, "low", None)),
        ({"reasoning_effort": "medium"}, (True, "medium", None)),
        ({"reasoning_effort": "xhigh"}, (True, "high", None)),
        ({"reasoning_effort": "max"}, (True, "high", None)),
        ({"reasoning": {"effort": "low"}}, (True, "low", None)),
        ({"reasoning": {"max_tokens": 50}}, (None, "", 50)),
        ({"reasoning": {"budget": 50, "effort": "high"}}, (True, "high", 50)),
        ({"reasoning": {"enabled": False}}, (False, "", None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, (True, "", 2048)),
        ({"thinking": {"type": "disabled"}}, (False, "", None)),
        ({"thinking": {"type": "adaptive"}}, (None, "", None)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (False, "", None)),
        ({"chat_template_kwargs": {"thinking": True}}, (True, "", None)),
        ({"chat_template_kwargs": {"reasoning_effort": "high", "thinking_budget": 9}}, (True, "high", 9)),
        ({"chat_template_kwargs": {"reasoning_effort": "its own word", "enable_thinking": "yes"}}, (None, "", None)),
    ],
)
def test_each_spelling_alone(fields: dict[str, Any], expected: tuple[bool | None, str, int | None]) -> None:
    assert wish(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, (True, "", None)),
        ({"enable_thinking": False, "thinking": {"type": "enabled", "budget_tokens": 5}}, (False, "", 5)),
        ({"enable_thinking": True, "reasoning_effort": "none"}, (True, "", None)),
        ({"enable_thinking": False, "reasoning_effort": "high"}, (False, "high", None)),
        ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "high"}}, (False, "high", None)),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, (True, "low", None)),
        ({"thinking_budget": 5, "reasoning_effort": "high"}, (True, "high", 5)),
    ],
)
def test_of_two_the_one_nearer_to_the_model_wins(
    fields: dict[str, Any], expected: tuple[bool | None, str, int | None]
) -> None:
    assert wish(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": "high"}, "reasoning"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
def test_what_means_nothing_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wish(**fields)
    assert caught.value.param == param


def test_the_templates_own_words_still_reach_it() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"thinking": True}}
    [found] = lower_chat(decode_chat(json.dumps(body).encode())[0], ModelConfig(name="m", path="m"), lambda: 1, 7)
    assert isinstance(found.prompt, ChatPrompt)
    assert found.prompt.template_kwargs == {"thinking": True}
