"""A prompt that does not fit is a 400 with both numbers in every dialect, or cut and told where that is asked for."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import serving
from tests.support.models import build

CONTEXT = 512
TURNS: list[dict[str, Any]] = [
    message
    for number in range(16)
    for message in ({"role": "user", "content": f"ka {number} " * 8}, {"role": "assistant", "content": "to mi"})
] + [{"role": "user", "content": "the newest"}]
CUT: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": TURNS, "max_output_tokens": 4, "truncation": "auto"},
    "/api/chat": {"messages": TURNS, "options": {"num_predict": 4}, "truncate": True},
    "/v1/completions": {"prompt": "ka to mi ra " * 300, "max_tokens": 4, "truncate_prompt_tokens": -1},
    "/api/generate": {"prompt": "ka to " * 600, "raw": True, "options": {"num_predict": 4}, "truncate": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    **{
        path: {name: value for name, value in body.items() if not name.startswith("trunc")}
        for path, body in CUT.items()
    },
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 4},
    "/v1/messages": {"messages": TURNS, "max_tokens": 4},
}


@pytest.mark.anyio
async def test_what_does_not_fit_is_refused_with_both_numbers_or_cut_and_told(tmp_path: Path) -> None:
    model = ModelConfig(name="m", path=str(build("qwen3", tmp_path / "m")), context=CONTEXT)
    async with serving(model) as gateway:
        for path, body in REFUSED.items():
            reply = await gateway.client.post(path, json=body | {"model": "m", "stream": False})
            assert reply.status_code == 400, path
            both = rf"(maximum context length is {CONTEXT} tokens.* \d+ tokens|\d+ tokens > {CONTEXT} maximum)"
            assert re.search(both, reply.text), path
        for path, body in CUT.items():
            for stream in (False, True):
                reply = await gateway.client.post(path, json=body | {"model": "m", "stream": stream})
                assert reply.status_code == 200, reply.text
                assert "x-mlxd-ignored" not in reply.headers
                turns, tokens = map(int, reply.headers["x-mlxd-truncated"].split(";"))
                is_chat = path in ("/v1/responses", "/api/chat")
                assert (turns > 0, tokens > 0) == (is_chat, True), path
        kept = {"model": "m", "prompt": "ka to mi", "max_tokens": 4, "truncate_prompt_tokens": 3}
        reply = await gateway.client.post("/v1/completions", json=kept)
        assert reply.json()["usage"]["prompt_tokens"] == 3
        chat = {"model": "m", "messages": TURNS, "max_tokens": 4, "temperature": 0}
        asked = await gateway.client.post("/tokenize", json={"model": "m", "messages": TURNS})
        whole = asked.json()["count"]
        for most in (3, -1):
            for stream in (False, True):
                body = chat | {"truncate_prompt_tokens": most, "stream": stream}
                reply = await gateway.client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                turns, tokens = map(int, reply.headers["x-mlxd-truncated"].split(";"))
                assert turns == 0
                assert tokens == whole - 3 or (most == -1 and whole - tokens < CONTEXT < whole)
                if not stream:
                    assert reply.json()["usage"]["prompt_tokens"] == whole - tokens
        fits = {"model": "m", "input": "ka", "max_output_tokens": 4, "truncation": "auto"}
        assert "x-mlxd-truncated" not in (await gateway.client.post("/v1/responses", json=fits)).headers


@pytest.mark.anyio
async def test_a_conversation_that_has_outgrown_its_context_still_finds_its_prefix(tmp_path: Path) -> None:
    model = ModelConfig(name="m", path=str(build("qwen3", tmp_path / "m")), context=CONTEXT)
    async with serving(model) as gateway:
        cached: list[int] = []
        for turns in range(21, len(TURNS) + 1, 2):
            body = {"model": "m", "input": TURNS[:turns], "max_output_tokens": 4, "truncation": "auto"}
            reply = await gateway.client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            cached.append(reply.json()["usage"]["input_tokens_details"]["cached_tokens"])
        assert sum(tokens > CONTEXT // 4 for tokens in cached) >= len(cached) // 2, cached
