"""Free-form JSON of clients, in every dialect: it can be sent to a worker, or it is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.anthropic.request import decode_messages, lower_messages
from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.api.responses.lowering import lower_prompt
from gateway.api.responses.request import decode_responses, toolbox
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from protocol import codec
from protocol.to_worker import ChatPrompt, Generate, Prompt, Sampling

MODEL = ModelConfig(name="m", path="m")


def chat(parameters: Any, arguments: str) -> Prompt:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"model": "m", "messages": messages, "tools": [tool]}
    return lower_chat(decode_chat(json.dumps(body).encode())[0], MODEL, lambda: 1, 1)[0].prompt


def messages(parameters: Any, arguments: str) -> Prompt:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": arguments}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [used]}]
    body = {"model": "m", "max_tokens": 1, "messages": turns, "tools": [{"name": "f", "input_schema": parameters}]}
    return lower_messages(decode_messages(json.dumps(body).encode())[0], MODEL, lambda: 1, 1).prompt


def responses(parameters: Any, arguments: str) -> Prompt:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
    ]
    tools = [{"type": "function", "name": "f", "parameters": parameters}]
    request = decode_responses(json.dumps({"model": "m", "input": items, "tools": tools}).encode())[0]
    return lower_prompt(request, toolbox(request), [])[0]


DIALECTS = [chat, messages, responses]


@pytest.mark.parametrize("lower", DIALECTS)
@pytest.mark.parametrize("parameters", [{"maximum": 1 << 64}, {"minimum": -(1 << 63) - 1}])
def test_a_schema_that_no_message_can_hold_is_a_refusal(lower: Callable[[Any, str], Prompt], parameters: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        codec.encode(Generate(1, lower(parameters, "{}"), Sampling()))

    assert refused.value.param is not None


def encoded_below(frames: int, message: Generate) -> bytes:
    """As by the sender, who is called by others than the check."""
    return encoded_below(frames - 1, message) if frames else codec.encode(message)


def test_a_schema_that_is_taken_is_never_too_deep_for_the_message_around_it() -> None:
    parameters: dict[str, Any] = {}
    for depth in range(1000):
        parameters = {"a": parameters}
        try:
            prompt = chat(parameters, "{}")
        except BadRequest:
            assert depth > 100
            return
        encoded_below(12, Generate(1, prompt, Sampling()))
    raise AssertionError("nothing was too deep")


@pytest.mark.parametrize("lower", DIALECTS)
@pytest.mark.parametrize(
    "arguments", ["", "[1", "99999999999999999999", "[1]", '{"a": 1e999}', '{"a": "\\ud800"}', '"\\udfff"', "[" * 5000]
)
def test_a_call_of_the_past_never_spoils_the_present(lower: Callable[[Any, str], Prompt], arguments: str) -> None:
    prompt = lower({"type": "object"}, arguments)

    assert isinstance(prompt, ChatPrompt)
    assert codec.encode(Generate(1, prompt, Sampling()))
    assert isinstance(prompt.messages[-1]["tool_calls"][0]["function"]["arguments"], dict)
