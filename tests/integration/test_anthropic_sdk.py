"""The official Anthropic client, unmodified, and the embedded model."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

from tests.support.daemon import DaemonProcess

pytestmark = pytest.mark.anyio

WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "the city"}},
        "required": ["city"],
    },
}


@pytest.fixture
async def client(demo_daemon: DaemonProcess) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic.AsyncAnthropic(base_url=demo_daemon.url, api_key="x", max_retries=0) as made:
        yield made


def asking(question: str, **fields: Any) -> dict[str, Any]:
    messages: list[MessageParam] = [{"role": "user", "content": question}]
    return {"model": "claude-haiku-4-5", "max_tokens": 200, "messages": messages} | fields


async def test_a_message(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(**asking("What is the capital of France?"))

    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Paris."}]
    assert (answer.model, answer.stop_reason) == ("demo", "end_turn")
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


async def test_a_streamed_message_is_the_same(client: anthropic.AsyncAnthropic) -> None:
    request = asking("Count from 3 to 9.")
    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()

    assert whole.content[0].type == final.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text == "3, 4, 5, 6, 7, 8, 9"
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_tool_round_trip(client: anthropic.AsyncAnthropic, is_stream: bool) -> None:
    async def ask(request: dict[str, Any]) -> anthropic.types.Message:
        if not is_stream:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            return await stream.get_final_message()

    request = asking("What is the weather in Oslo?", tools=[WEATHER])
    first = await ask(request)

    assert first.stop_reason == "tool_use"
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})

    result: ToolResultBlockParam = {"type": "tool_result", "tool_use_id": call.id, "content": "7 degrees, rain"}
    history = [*request["messages"], first.to_param(), {"role": "user", "content": [result]}]
    second = await ask(request | {"messages": history})

    assert second.stop_reason == "end_turn"
    assert second.content[0].type == "text"
    assert "7" in second.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_call_that_must_be_made_is_made(client: anthropic.AsyncAnthropic, choice: dict[str, str]) -> None:
    answer = await client.messages.create(**asking("Hello.", tools=[WEATHER], tool_choice=choice))

    assert answer.stop_reason == "tool_use"
    assert answer.content[-1].type == "tool_use"
    assert set(answer.content[-1].input) == {"city"}


async def test_thinking_comes_back_signed_and_may_be_sent_again(client: anthropic.AsyncAnthropic) -> None:
    request = asking("What is 12 plus 30?", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    async with client.messages.stream(**request) as stream:
        kinds = [event.type async for event in stream if event.type in ("thinking", "signature", "text")]
        first = await stream.get_final_message()

    thought, said = first.content
    assert thought.type == "thinking"
    assert thought.thinking
    assert thought.signature
    assert said.type == "text"
    assert "42" in said.text
    assert list(dict.fromkeys(kinds)) == ["thinking", "signature", "text"]
    assert first.usage.output_tokens_details is not None
    assert first.usage.output_tokens_details.thinking_tokens > 0

    history = [*request["messages"], first.to_param(), {"role": "user", "content": "Thanks!"}]
    assert (await client.messages.create(**request | {"messages": history})).stop_reason == "end_turn"


async def test_a_stop_sequence(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(**asking("Count from 3 to 9.", stop_sequences=[", 6"]))

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ", 6")
    assert answer.content[0].to_dict() == {"type": "text", "text": "3, 4, 5"}


async def test_a_structured_answer(client: anthropic.AsyncAnthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    request = asking("Where is the Louvre?", output_config={"format": {"type": "json_schema", "schema": schema}})
    answer = await client.messages.create(**request)

    assert answer.content[0].type == "text"
    assert set(json.loads(answer.content[0].text)) == {"city"}


async def test_a_count_of_tokens(client: anthropic.AsyncAnthropic) -> None:
    request = asking("Hello.", system="Be brief.", tools=[WEATHER])
    parts = ("model", "messages", "system", "tools")
    counted = await client.messages.count_tokens(**{key: request[key] for key in parts})
    usage = (await client.messages.create(**request)).usage

    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list(limit=1)] == ["demo", "small"]
    one = await client.models.retrieve("claude-haiku-4-5")
    assert (one.id, one.type, one.display_name) == ("demo", "model", "demo")


async def test_errors_arrive_as_the_clients_own_exceptions(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**asking("Hello.", model="gpt-9"))
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        await client.messages.create(**asking("Hello.", tool_choice={"type": "sometimes"}))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 maximum"):
        await client.messages.create(**asking("one two three " * 60, model="small"))

    assert missing.value.type == "not_found_error"
