"""The official OpenAI client, unmodified, and the embedded model: what needs a model that understands."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "the city"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
async def client(demo_daemon: DaemonProcess) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{demo_daemon.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def asking(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "max_tokens": 200, "temperature": 0, "messages": messages} | fields


async def ask(
    client: openai.AsyncOpenAI, request: dict[str, Any], is_stream: bool
) -> tuple[ChatCompletionMessage, str]:
    """The message and why it ended, asked for in one piece or folded by the client's own helper."""
    if not is_stream:
        whole = await client.chat.completions.create(**request)
        return whole.choices[0].message, whole.choices[0].finish_reason
    async with client.chat.completions.stream(**request) as stream:
        folded = await stream.get_final_completion()
    return folded.choices[0].message, folded.choices[0].finish_reason


both_ways = pytest.mark.parametrize("is_stream", [False, True])


@both_ways
async def test_a_question(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    message, finish = await ask(client, asking("What is the capital of France?"), is_stream)

    assert (message.content, finish) == ("Paris.", "stop")


@both_ways
async def test_a_tool_round_trip(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    request = asking("What is the weather in Oslo?", tools=[WEATHER])
    message, finish = await ask(client, request, is_stream)

    assert finish == "tool_calls"
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}

    result = {"role": "tool", "tool_call_id": call.id, "content": "7 degrees, rain"}
    echoed = message.model_dump(exclude_unset=True)
    message, finish = await ask(client, request | {"messages": [*request["messages"], echoed, result]}, is_stream)

    assert finish == "stop"
    assert message.content is not None
    assert "7" in message.content


@both_ways
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_be_made_is_made(client: openai.AsyncOpenAI, choice: Any, is_stream: bool) -> None:
    message, _ = await ask(client, asking("Hello.", tools=[WEATHER], tool_choice=choice), is_stream)

    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}


@both_ways
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thinking_is_apart_from_the_answer(client: openai.AsyncOpenAI, name: str, is_stream: bool) -> None:
    request = asking("What is 12 plus 30?", extra_body={"enable_thinking": True})
    message, finish = await ask(client, request, is_stream)

    assert message.content is not None
    assert "42" in message.content
    assert "think>" not in message.content
    assert finish == "stop"
    assert message.to_dict()[name]


async def test_reasoning_tokens_are_counted(client: openai.AsyncOpenAI) -> None:
    request = asking("What is 12 plus 30?", reasoning_effort="high")
    usage = (await client.chat.completions.create(**request)).usage

    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens


@both_ways
async def test_a_stop_string(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    message, finish = await ask(client, asking("Count from 3 to 9.", stop=[", 6"]), is_stream)

    assert (message.content, finish) == ("3, 4, 5", "stop")


@both_ways
async def test_the_length_of_an_answer(client: openai.AsyncOpenAI, is_stream: bool) -> None:
    request = asking("Count from 3 to 9.", max_tokens=4)
    if is_stream:
        # The client's stream helper raises on it, as it does with OpenAI's own server.
        with pytest.raises(openai.LengthFinishReasonError):
            await ask(client, request, is_stream)
        return
    _, finish = await ask(client, request, is_stream)
    assert finish == "length"


async def test_a_prompt_that_is_too_long_is_a_typed_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**asking("one two three " * 60, model="small"))

    assert caught.value.code == "context_length_exceeded"


async def test_a_running_answer_is_steered_over_a_websocket(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect() as connection, asyncio.timeout(patient(60)):
        await connection.response.create(model="demo", input="List the numbers from 1 to 80.", store=False)
        events: list[Any] = [await connection.recv()]
        while events[-1].type != "response.output_text.delta":
            events.append(await connection.recv())
        target = events[0].response.id
        await connection.response.steer(previous_response_id=target, input="What is the capital of France?")
        ended: list[Any] = []
        while len(ended) < 2:
            events.append(await connection.recv())
            assert events[-1].type != "response.steer.failed", events[-1]
            ended += [events[-1].response] if events[-1].type in ("response.completed", "response.incomplete") else []

    assert "response.steer.accepted" in {event.type for event in events}
    first, second = ended
    assert first.id == second.previous_response_id == target
    # The answer was cut off, unless its last token was on its way already.
    assert first.status == "completed" or first.incomplete_details.reason == "steered"
    # The new answer has read the first prompt, what was said, and the new input, from the cache as far as it could.
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.output_text
