"""Sparse prefill is named wherever a client can see it: in each answer, its usage and metrics; and refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import worker_spec_and_group
from gateway.config.settings import ModelConfig
from tests.gateway.harness import serving
from tests.support.daemon import DaemonProcess
from worker.sparse_prefill import BLOCK_TOKENS, HEAD_BLOCKS, TAIL_BLOCKS

TEXT = "The river was low that summer, and the people of the town walked across it. " * 20
ASKED = [{"role": "user", "content": TEXT}]
ANSWERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": ASKED, "max_tokens": 2}, ("prompt_tokens_details", "kept_tokens")),
    "/v1/completions": ({"prompt": TEXT, "max_tokens": 2}, ("prompt_tokens_details", "kept_tokens")),
    "/v1/messages": ({"messages": ASKED, "max_tokens": 2}, ("kept_input_tokens",)),
    "/v1/responses": ({"input": TEXT, "max_output_tokens": 2}, ("input_tokens_details", "kept_tokens")),
    "/api/chat": ({"messages": ASKED, "stream": False, "options": {"num_predict": 2}}, ()),
}


@pytest.mark.soak
@pytest.mark.anyio
async def test_every_dialect_names_what_was_kept_of_the_prompt(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model_folder("qwen3"))
    monkeypatch.setattr(worker_spec_and_group, "SPARSE_FROM_TOKENS", 256)
    async with serving(ModelConfig(name="m", path=folder, draft=folder, sparse_prefill=0.05)) as gateway:
        for path, (body, places) in ANSWERS.items():
            plain = await gateway.client.post(path, json=body | {"model": "m"})
            assert "x-mlxd-relaxed" not in plain.headers, path
            reply = await gateway.client.post(path, json=body | {"model": "m", "sparse_prefill": True})
            assert reply.status_code == 200, reply.text
            _, _, kept, _, total = reply.headers["x-mlxd-relaxed"].split("-")
            assert (HEAD_BLOCKS + TAIL_BLOCKS - 1) * BLOCK_TOKENS < int(kept) < int(total) - BLOCK_TOKENS
            if places:
                told = reply.json()["usage"]
                for name in places:
                    told = told[name]
                assert told == int(kept)
        metrics = (await gateway.client.get("/metrics")).text
        assert f'mlxd_sparse_prefill_prompts_total{{model="m"}} {len(ANSWERS)}.0' in metrics
        body = ANSWERS["/v1/completions"][0] | {"model": "m", "echo": True, "logprobs": 1, "sparse_prefill": True}
        refused = await gateway.client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sparse_prefill")


def test_a_model_without_it_refuses_such_a_request_in_every_dialect(demo_daemon: DaemonProcess) -> None:
    for path, (body, _) in ANSWERS.items():
        reply = demo_daemon.client.post(path, json=body | {"model": "demo", "sparse_prefill": True})
        assert reply.status_code == 400, path
        assert "This model has no sparse prefill" in reply.text
