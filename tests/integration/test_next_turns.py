"""Next turns that real workers prefill while they are idle: what the next request finds in the prefix cache."""

from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, serving, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def ask(gateway: Gateway, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 400, "reasoning_effort": "high"}
    answer = await gateway.client.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    asked = len([turn for turn in messages if turn["role"] in ("user", "tool")])
    is_on = gateway.app.services.config.models["demo"].prefill_next_turn
    await until(lambda: gateway.metrics.model("demo").next_turns == (asked if is_on else 0))
    await until(lambda: gateway.link.in_flight == 0)
    return answer.json()


async def two_turns(gateway: Gateway) -> tuple[str, int]:
    """Return the second answer, and how many tokens of its prompt were not cached."""
    messages = [{"role": "user", "content": "What is the capital of Norway?"}]
    first = (await ask(gateway, messages))["choices"][0]
    assert first["finish_reason"] == "stop"
    assert len(first["message"]["reasoning_content"]) > 20, "the template drops this from the history"
    messages += [
        {"role": "assistant", "content": first["message"]["content"]},
        {"role": "user", "content": "And of Sweden?"},
    ]
    second = await ask(gateway, messages)
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return second["choices"][0]["message"]["content"], usage["prompt_tokens"] - cached


async def test_the_next_turn_computes_only_its_own_message() -> None:
    async with serving(ModelConfig(name="demo", path="demo")) as gateway:
        answer, computed = await two_turns(gateway)
        counted = gateway.metrics.model("demo").prompt_tokens
    async with serving(ModelConfig(name="demo", path="demo", prefill_next_turn=False)) as gateway:
        undisturbed, all_computed = await two_turns(gateway)
        assert gateway.metrics.model("demo").prompt_tokens == counted, "a prefill is no request"
    assert answer == undisturbed
    # "And of Sweden?" with the markup of its turn and of the answer's beginning.
    assert computed <= 16 < all_computed
