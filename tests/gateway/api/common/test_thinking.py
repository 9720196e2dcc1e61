"""Every spelling of how much to think, and which one wins."""

import json
from itertools import count
from typing import Any

import pytest

from gateway.api.anthropic.request import decode_messages, lower_messages
from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.api.responses.lowering import lower_prompt, lower_responses
from gateway.api.responses.request import decode_responses, toolbox
from gateway.config.settings import ModelConfig, ThinkingDefaults
from gateway.errors import ApiError
from protocol.to_worker import ChatPrompt

MODEL = ModelConfig(name="m", path="m")


def wish(model: ModelConfig = MODEL, /, **fields: Any) -> tuple[bool | None, str, int | None]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    request, unknown = decode_chat(json.dumps(body).encode())
    assert not unknown
    [found] = lower_chat(request, model, count(1).__next__, 7)
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
        ({"chat_template_kwargs": {"thinking_budget": 2**60}}, (None, "", 2**40)),
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


def wish_by_default(default: ThinkingDefaults, **fields: Any) -> tuple[bool | None, str, int | None]:
    return wish(ModelConfig(name="m", path="m", thinking=default), **fields)


def anthropic_wish(default: ThinkingDefaults, **fields: Any) -> tuple[bool | None, str, int | None]:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    request, _ = decode_messages(json.dumps(body).encode())
    found = lower_messages(request, ModelConfig(name="m", path="m", thinking=default), count(1).__next__, 7)
    assert isinstance(found.prompt, ChatPrompt)
    return found.prompt.thinking, found.prompt.effort, found.thinking_budget


def responses_wish(default: ThinkingDefaults, **fields: Any) -> tuple[bool | None, str, int | None]:
    request, _ = decode_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode())
    prompt, _ = lower_prompt(request, toolbox(request), ())
    model = ModelConfig(name="m", path="m", thinking=default)
    found = lower_responses(request, prompt, model, count(1).__next__, 7)
    assert isinstance(found.prompt, ChatPrompt)
    return found.prompt.thinking, found.prompt.effort, found.thinking_budget


OFF, HIGH, SHORT = ThinkingDefaults(enabled=False), ThinkingDefaults(effort="high"), ThinkingDefaults(budget=64)


@pytest.mark.parametrize(
    ("default", "fields", "expected"),
    [
        (OFF, {}, (False, "", None)),
        (OFF, {"enable_thinking": True}, (True, "", None)),
        (OFF, {"reasoning_effort": "low"}, (True, "low", None)),
        (OFF, {"chat_template_kwargs": {"enable_thinking": True}}, (True, "", None)),
        (HIGH, {}, (True, "high", None)),
        (HIGH, {"enable_thinking": False}, (False, "", None)),
        (HIGH, {"reasoning_effort": "low"}, (True, "low", None)),
        (HIGH, {"thinking_budget": 5}, (True, "high", 5)),
        (SHORT, {}, (None, "", 64)),
        (SHORT, {"thinking_budget": 5}, (None, "", 5)),
        (ThinkingDefaults(effort="minimal"), {}, (False, "", None)),
        (ThinkingDefaults(enabled=False, effort="high", budget=9), {}, (False, "", None)),
    ],
)
def test_what_is_configured_fills_what_a_request_leaves_open(
    default: ThinkingDefaults, fields: dict[str, Any], expected: tuple[bool | None, str, int | None]
) -> None:
    assert wish_by_default(default, **fields) == expected
    assert responses_wish(default, **fields) == expected


@pytest.mark.parametrize(
    ("default", "fields", "expected"),
    [
        (ThinkingDefaults(), {}, (False, "", None)),
        (OFF, {}, (False, "", None)),
        (HIGH, {}, (True, "high", None)),
        (SHORT, {}, (False, "", None)),
        (HIGH, {"thinking": {"type": "disabled"}}, (False, "", None)),
        (OFF, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, (False, "high", None)),
        (OFF, {"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, "", 9)),
        (HIGH, {"thinking": {"type": "adaptive"}}, (True, "high", None)),
        (HIGH, {"output_config": {"effort": "low"}}, (True, "low", None)),
    ],
)
def test_anthropics_own_default_stays_where_nothing_is_configured(
    default: ThinkingDefaults, fields: dict[str, Any], expected: tuple[bool | None, str, int | None]
) -> None:
    assert anthropic_wish(default, **fields) == expected
