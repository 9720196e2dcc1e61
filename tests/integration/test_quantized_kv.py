"""Quantized KV is named wherever a client can see it: in each answer, on the model's card and in metrics."""

from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import serving
from tests.support.models import build

ASKED = [{"role": "user", "content": "Hello"}]
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/messages": {"messages": ASKED, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/api/chat": {"messages": ASKED, "options": {"num_predict": 2}},
}


@pytest.mark.anyio
async def test_every_dialect_names_the_bits_in_whole_answers_and_in_streams() -> None:
    async with serving(ModelConfig(name="m", path="demo", kv_bits=8)) as gateway:
        for path, body in ANSWERS.items():
            for stream in (False, True):
                reply = await gateway.client.post(path, json=body | {"model": "m", "stream": stream})
                assert reply.status_code == 200, reply.text
                assert reply.headers["x-mlxd-relaxed"] == "kv-bits-8", path
        card = (await gateway.client.get("/v1/models/m")).json()
        assert card["kv_bits"] == 8
        metrics = (await gateway.client.get("/metrics")).text
        assert 'mlxd_kv_cache_quantization{model="m"} 8.0' in metrics


@pytest.mark.soak
@pytest.mark.anyio
async def test_a_model_that_cannot_have_it_says_why(tmp_path: Path) -> None:
    path = build("qwen3", tmp_path / "narrow")
    async with serving(ModelConfig(name="m", path=str(path), kv_bits=4)) as gateway:
        reply = await gateway.client.post("/v1/chat/completions", json={"model": "m", "messages": ASKED})
        assert reply.status_code == 503
        assert "heads have 16 numbers, which neither 64 nor 32 divides" in reply.json()["error"]["message"]
