"""Tools by the official OpenAI client, against a real model that knows nothing: grammars make it call."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import Gateway, running
from tests.support.calls import TOOLS, markers
from tests.support.models import build
from tests.support.pool import short_home
from tests.support.scale import scaled
from tests.worker.engine.test_tools import PLAIN, THINKING

pytestmark = pytest.mark.anyio
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "kato mira sen"}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    models: list[ModelConfig] = []
    for name, family, template in (("plain", "qwen3_coder", PLAIN), ("thinker", "hermes", THINKING)):
        path = build("qwen3", tmp_path_factory.mktemp(name), markers=markers())
        (path / "chat_template.jinja").write_text(template)
        models.append(ModelConfig(name=name, path=str(path), parser=family))
    with short_home() as home:
        async with running(home, models=models, command=default_command) as made:
            yield made


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def check(answer: ChatCompletion) -> list[tuple[str, dict[str, Any]]]:
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert choice.message.tool_calls
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    for name, arguments in found:
        jsonschema.validate(arguments, SCHEMAS[name])
    return found


@pytest.mark.parametrize("model", ["plain", *scaled(["thinker"], [])])
async def test_a_tool_round_trip_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": TOOLS, "tool_choice": "required", "seed": 5, "max_tokens": 400}
    whole = await client.chat.completions.create(messages=ASK, **asked)
    calls = check(whole)
    async with client.chat.completions.stream(messages=ASK, **asked) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()

    assert check(streamed) == calls
    message = whole.choices[0].message
    assert message.tool_calls
    turns: list[Any] = [*ASK, message.model_dump(exclude_none=True)]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    after = await client.chat.completions.create(model=model, messages=turns, tools=TOOLS, max_tokens=5)
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


async def test_a_named_tool_is_called_once_and_parallel_calls_can_be_refused(client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "set-it"}}
    one = await client.chat.completions.create(
        model="plain", messages=ASK, tools=TOOLS, tool_choice=named, max_tokens=200
    )
    alone = await client.chat.completions.create(
        model="plain", messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )

    assert [name for name, _ in check(one)] == ["set-it"]
    assert len(check(alone)) == 1


async def test_reasoning_before_a_call_is_counted_and_bounded(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="thinker", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=400, seed=5,
        extra_body={"thinking_budget": 20},
    )  # fmt: skip

    check(answer)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 20 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= 24
    assert answer.choices[0].message.model_extra
    assert answer.choices[0].message.model_extra["reasoning_content"]


async def test_functions_of_old_are_answered_in_their_own_shape(client: openai.AsyncOpenAI) -> None:
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    answer = await client.chat.completions.create(
        model="plain", messages=ASK, functions=functions, function_call={"name": "now"}, max_tokens=100
    )
    [choice] = answer.choices

    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("now", "{}")
    assert choice.message.tool_calls is None
