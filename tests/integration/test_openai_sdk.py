"""The official OpenAI client, unmodified."""

import json
from collections.abc import AsyncGenerator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.harness import Gateway, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "1"], worker="talkative") as running_gateway:
        yield running_gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def asking(*script: list[str]) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": json.dumps(script) if script else "hi"}]


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m",
        messages=asking(["text", "Hello"], ["finish", "stop"]),
        temperature=0,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": 1},
        seed=1,
        stop=["x"],
        user="u",
        metadata={"a": "b"},
        store=False,
        max_completion_tokens=9,
    )

    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1


async def test_a_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    text = ""
    finish = usage = None
    stream = await client.chat.completions.create(
        model="m", messages=asking(), max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage

    assert text == "t0 t1 t2 "
    assert finish == "length"
    assert usage is not None
    assert usage.completion_tokens == 3


async def test_the_stream_helper_puts_tool_calls_and_text_together(client: openai.AsyncOpenAI) -> None:
    messages = asking(
        ["reasoning", "hm"],
        ["text", "Calling"],
        ["tool", "f", '{"a": 1}'],
        ["tool", "g", "{}"],
        ["finish", "tool_calls"],
    )
    async with client.chat.completions.stream(model="m", messages=messages) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()

    message = final.choices[0].message
    assert message.content == "Calling"
    assert message.tool_calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("call_0", "f", '{"a": 1}'),
        ("call_1", "g", "{}"),
    ]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=asking(["logprobs", "é"], ["finish", "stop"]), logprobs=True, top_logprobs=2
    )

    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    [token] = answer.choices[0].logprobs.content
    assert (token.token, token.bytes, token.logprob) == ("é", [0xC3, 0xA9], -0.5)
    assert [top.token for top in token.top_logprobs] == ["é", "other"]


async def test_completions_in_one_piece_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=2, n=2)
    streamed = ""
    async for chunk in await client.completions.create(model="m", prompt="a", max_tokens=2, stream=True):
        streamed += chunk.choices[0].text

    assert [choice.text for choice in answer.choices] == ["t0 t1 "] * 4
    assert streamed == "t0 t1 "


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "mlxd"


async def test_errors_arrive_as_the_clients_own_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=asking())
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=asking(), temperature=9)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="m", prompt="refused", stream=True)

    assert missing.value.code == "model_not_found"
    assert bad.value.param == "temperature"


async def test_an_error_amid_a_stream_is_raised_after_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    messages = asking(["text", "before"], ["wait"], ["finish", "abort"])
    text = ""

    async def read() -> None:
        nonlocal text
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="stopped"):
        await read()
    assert text == "before"


async def test_closing_a_stream_early_frees_the_sequence(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="m", messages=asking(), stream=True, max_tokens=1_000_000)
    async for _ in stream:
        break
    await stream.close()

    await until(lambda: gateway.link.in_flight == 0)
