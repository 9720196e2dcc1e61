"""Warm prompts of the configuration: their check, and what the first request finds of them on a real worker."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.api.openai.warm_prompts import WARM_PRIORITY, check_warm_prompts, read_warm_prompt
from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError, ModelConfig
from tests.gateway.harness import serving, until

pytestmark = pytest.mark.anyio
SYSTEM = {"role": "system", "content": "ka to mi ra sen lu por vi " * 20}

IMAGE = {"type": "image_url", "image_url": {"url": "https://x/y"}}
PICTURE = {"messages": [{"role": "user", "content": [IMAGE]}]}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def asking(text: str) -> dict[str, Any]:
    return {"messages": [SYSTEM, {"role": "user", "content": text}]}


def load(folder: Path, more: str = "") -> Config:
    (folder / "mlxd.toml").write_text(f'[models.m]\npath = "demo"\naliases = ["other"]\nwarm = ["warm.json"]\n{more}')
    return check_warm_prompts(load_config(folder, has_keys=lambda _: True))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, "No such file"),
        (b"{", "not valid JSON"),
        (b'{"messages": []}', "messages"),
        (json.dumps(asking("x") | {"temperature": 9}).encode(), "temperature"),
        (json.dumps(asking("x") | {"model": "gpt-9"}).encode(), "another model, 'gpt-9'"),
        (json.dumps({"messages": [{"role": "assistant", "content": "x", "tool_calls": 3}]}).encode(), "tool_calls"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}]}',
            "text",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_name_and_the_reason(
    tmp_path: Path, body: bytes | None, why: str
) -> None:
    if body is not None:
        (tmp_path / "warm.json").write_bytes(body)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path)
    assert str(tmp_path / "warm.json") in str(refused.value)
    assert why in str(refused.value)
    assert refused.value.line == 4


def test_a_file_is_read_as_a_request_that_runs_last_and_generates_nothing(tmp_path: Path) -> None:
    (tmp_path / "warm.json").write_text(json.dumps(asking("x") | {"model": "other", "max_tokens": 9, "stop": "y"}))
    model = load(tmp_path).models["m"]

    generate = read_warm_prompt(model.warm[0], model, 1 << 20)
    assert (generate.max_tokens, generate.priority, generate.stop) == (0, WARM_PRIORITY, ())
    with pytest.raises(ConfigError, match="for models that generate text"):
        load(tmp_path, 'kind = "embed"')


async def test_the_first_request_after_each_load_finds_the_prompt(
    tmp_path: Path, model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(asking("first")))
    (tmp_path / "b.json").write_text("{")
    files = tuple(str(tmp_path / name) for name in ("b.json", "a.json"))
    model = ModelConfig(name="m", path=str(model_folder("qwen3")), warm=files)
    asked = 0
    async with serving(model) as gateway:
        for text in ("second", "third"):
            await gateway.pool.load("m")
            await until(lambda: not gateway.app.warm_up.is_busy)
            body = {"model": "m", "max_tokens": 2} | asking(text)
            usage = (await gateway.client.post("/v1/chat/completions", json=body)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100
            asked += usage["prompt_tokens"]
            await gateway.pool.unload("m")
        # A warm prompt is no request.
        assert gateway.metrics.model("m").prompt_tokens == asked
    assert any("b.json is no chat request" in record.getMessage() for record in caplog.records)
