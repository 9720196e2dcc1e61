"""Audio over HTTP to a worker with a tower that hears: one clip in both kinds of parts."""

import base64
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import Gateway, running
from tests.support import hearing
from tests.support.pool import short_home
from tests.worker.vision.test_sounds import tone, wav

pytestmark = pytest.mark.anyio
RATE = 16_000
LOW, HIGH = (base64.b64encode(wav(tone(RATE, 0.4, hertz=hertz), RATE)).decode() for hertz in (300.0, 2000.0))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    folder = hearing.build("gemma4", tmp_path_factory.mktemp("hearing"))
    models = [ModelConfig(name="m", path=str(folder))]
    with short_home() as home:
        async with running(home, models=models, command=default_command) as made:
            yield made


async def asked(gateway: Gateway, *parts: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {
        "model": "m", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}],
        "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip
    reply = await gateway.client.post("/v1/chat/completions", json=body)
    return reply.status_code, reply.json()


def as_input(data: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def as_url(data: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}


async def test_a_clip_is_heard_the_same_by_both_kinds_of_parts(gateway: Gateway) -> None:
    (status, first), (_, again), (_, other) = [
        await asked(gateway, part) for part in (as_input(LOW), as_url(LOW), as_input(HIGH))
    ]

    assert status == 200, first
    assert first["usage"]["prompt_tokens_details"]["audio_tokens"] == 10
    logprobs = [answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in (first, again, other)]
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert abs(logprobs[0] - logprobs[2]) > 1e-3
