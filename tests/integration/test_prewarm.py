"""Prompts that are put into the prefix cache without an answer, by the vendors' own clients."""

from collections.abc import AsyncGenerator

import anthropic
import openai
import pytest

from tests.support.daemon import DaemonProcess

pytestmark = pytest.mark.anyio
# More tokens than the shortest prefix that is shared.
WORDS = "count the towers of the old town and name each of them once " * 12


@pytest.fixture
async def client(demo_daemon: DaemonProcess) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{demo_daemon.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def test_a_prewarmed_response_completes_without_output_and_the_next_finds_its_prompt(
    client: openai.AsyncOpenAI,
) -> None:
    asked = {"model": "demo", "input": f"one {WORDS}", "max_output_tokens": 4}
    warm = await client.responses.create(**asked, prompt_cache_options={"prewarm": True, "mode": "implicit"})

    assert (warm.status, warm.output, warm.incomplete_details) == ("completed", [], None)
    assert warm.usage is not None
    assert (warm.usage.input_tokens > 100, warm.usage.output_tokens) == (True, 0)
    answer = await client.responses.create(**asked)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == warm.usage.input_tokens - 1
    assert answer.usage.output_tokens > 0

    stream = await client.responses.create(**asked, stream=True, prompt_cache_options={"prewarm": True})
    kinds = [event.type async for event in stream]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prewarmed_chat_has_an_empty_choice_and_the_next_finds_its_prompt(
    client: openai.AsyncOpenAI, is_stream: bool
) -> None:
    messages = [{"role": "user", "content": f"two {is_stream} {WORDS}"}]
    asked = {"model": "demo", "messages": messages, "max_tokens": 4}
    warmed = asked | {"extra_body": {"prompt_cache_options": {"prewarm": True}}}
    if is_stream:
        stream = await client.chat.completions.create(**warmed, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        usage = chunks[-1].usage
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ""
        assert chunks[-2].choices[0].finish_reason == "length"
    else:
        warm = await client.chat.completions.create(**warmed)
        usage = warm.usage
        assert (warm.choices[0].message.content, warm.choices[0].finish_reason) == ("", "length")
    assert usage.completion_tokens == 0
    answer = await client.chat.completions.create(**asked)
    assert answer.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


async def test_a_message_of_no_tokens_leaves_its_prompt_in_the_cache(demo_daemon: DaemonProcess) -> None:
    async with anthropic.AsyncAnthropic(base_url=demo_daemon.url, api_key="x", max_retries=0) as client:
        asked = {"model": "demo", "messages": [{"role": "user", "content": f"three {WORDS}"}]}
        warm = await client.messages.create(**asked, max_tokens=0)
        answer = await client.messages.create(**asked, max_tokens=4)

    assert (warm.stop_reason, warm.usage.output_tokens) == ("max_tokens", 0)
    assert warm.usage.cache_read_input_tokens is not None
    prompt = warm.usage.input_tokens + warm.usage.cache_read_input_tokens
    assert answer.usage.cache_read_input_tokens == prompt - 1
