"""A model that cannot be batched is served one request at a time, and everything that an operator reads says so."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import chat, serving

pytestmark = pytest.mark.anyio

REASON = "m: requests run one at a time, because ValueError: "


async def test_requests_at_once_are_answered_and_the_batch_mode_is_shown(model_folder: Callable[[str], Path]) -> None:
    async with serving(ModelConfig(name="m", path=str(model_folder("gpt_bigcode")))) as gateway:
        bodies = [chat("word " * words, temperature=0) for words in (3, 30, 60)]
        answers = await asyncio.gather(*(gateway.client.post("/v1/chat/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200, 200, 200]

        health = (await gateway.client.get("/health")).json()
        assert health["status"] == "healthy"
        assert health["notes"][0].startswith(REASON)
        assert (
            'mlxd_worker_batch_mode{batch_mode="single",model="m"} 1.0' in (await gateway.client.get("/metrics")).text
        )
        view = gateway.pool.worker("m").view()
        assert view.ready is not None
        assert (view.ready.batch_mode, view.ready.max_running, view.restarts) == ("single", 1, 0)
