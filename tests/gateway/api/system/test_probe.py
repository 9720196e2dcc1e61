import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile
from gateway.api.system import health as deep
from gateway.config.settings import ModelConfig
from protocol.checkpoint import AUDIO
from protocol.from_worker import Ready
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling
from tests.gateway.harness import Gateway, chat, running
from tests.support.audio_models import build_moonshine, build_qwen_tts
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_model import load_audio_model

pytestmark = pytest.mark.anyio

MODELS = [ModelConfig(name="one", path="p", aliases=("uno",)), ModelConfig(name="two", path="p")]


@asynccontextmanager
async def with_one_loaded(home: Path, *options: str) -> AsyncGenerator[Gateway, None]:
    async with running(home, ["--step-ms", "1", *options], models=MODELS) as gateway:
        await gateway.pool.load("one")
        yield gateway


async def deep_health(gateway: Gateway, query: str = "") -> tuple[int, dict[str, Any]]:
    answer = await gateway.client.get(f"/healthz?deep=1{query}")
    return answer.status_code, answer.json()


async def test_each_loaded_model_says_a_token_and_no_other_is_loaded(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        status, found = await deep_health(gateway)

        assert (status, found["status"]) == (200, "healthy")
        [probe] = found["models"]
        assert (probe["model"], probe["ok"], probe["state"], probe["error"]) == ("one", True, "ready", "")
        assert probe["ms"] > 0
        assert gateway.pool.worker("two").pid == 0
        assert gateway.link.in_flight == 0


async def test_a_model_can_be_named_and_one_that_is_not_loaded_is_not_sick(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        assert [probe["model"] for probe in (await deep_health(gateway, "&model=uno"))[1]["models"]] == ["one"]
        status, found = await deep_health(gateway, "&model=two")
        assert (status, found["models"][0]["state"]) == (200, "stopped")
        assert gateway.pool.worker("two").pid == 0
        assert (await deep_health(gateway, "&model=three"))[0] == 404
        assert (await gateway.client.get("/healthz?deep=yes")).status_code == 400


async def test_it_is_nobodys_traffic(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        await deep_health(gateway)
        numbers = gateway.metrics.model("one")

        assert not numbers.requests
        assert not numbers.finished
        assert numbers.e2e.count == numbers.ttft.count == 0
        assert gateway.pool.broker.leases("one") == 0
        assert not gateway.app.services.requests.views()


async def test_a_broken_model_is_sick(tmp_path: Path) -> None:
    async with running(tmp_path, ["--exit-on-load", "66"], models=MODELS) as gateway:
        await gateway.client.post("/v1/chat/completions", json=chat(model="one"))
        status, found = await deep_health(gateway, "&model=one")

        assert (status, found["status"], found["models"][0]["state"]) == (503, "unhealthy", "failed")


async def test_a_wedged_model_does_not_answer_in_time(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        os.kill(gateway.pool.worker("one").pid, signal.SIGSTOP)
        found = await deep.examine(gateway.app.services, deadline_s=0.3)
        os.kill(gateway.pool.worker("one").pid, signal.SIGCONT)

        assert (found.status, found.models[0].error) == ("unhealthy", "no token within 0.3 s")
        assert gateway.link.in_flight == 0


async def test_a_model_that_serves_others_meanwhile_is_busy_and_not_sick(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path, "--ignore-prompt", "Hi") as gateway:
        assert (await deep.examine(gateway.app.services, deadline_s=0.3)).status == "unhealthy"
        body = chat(model="one", max_tokens=1_000_000, stream=True)
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            found = await deep.examine(gateway.app.services, deadline_s=0.5)

        assert (found.status, found.models[0].state) == ("healthy", "busy")


async def test_a_model_that_is_held_back_for_a_moment_is_asked_when_it_may(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        worker = gateway.pool.worker("one")
        worker.close_gate()
        assert (await deep.examine(gateway.app.services, deadline_s=0.2)).models[0].error == "no token within 0.2 s"
        asking = asyncio.create_task(deep.examine(gateway.app.services))
        worker.open_gate()

        assert (await asking).status == "healthy"


async def test_once_there_are_keys_only_an_admins_opens_it(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        file = KeyFile(tmp_path / "keys" / "keys.json")
        _, secret = file.create(Key(name="user", prefix="", salt="", hash=""))
        _, admin = file.create(Key(name="boss", prefix="", salt="", hash="", is_admin=True))
        statuses: list[int] = []
        for key in (None, "sk-wrong", secret, admin):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            statuses.append((await gateway.client.get("/healthz?deep=1", headers=headers)).status_code)

        assert statuses == [401, 401, 403, 200]
        assert (await gateway.client.get("/healthz")).status_code == 200


async def test_nobody_is_asked_while_draining(tmp_path: Path) -> None:
    async with with_one_loaded(tmp_path) as gateway:
        gateway.app.drain()
        assert await deep_health(gateway) == (503, {"status": "draining", "reasons": []})


def test_models_of_audio_are_asked_for_what_they_can_do(tmp_path: Path) -> None:
    for build, folder in ((build_moonshine, "hears"), (partial(build_qwen_tts, design=True), "described")):
        spec = WorkerSpec("m", str(build(tmp_path / folder)), 1, "", "")
        model = load_audio_model(spec, lambda *_: None)
        ready = Ready(1, "", 0, 1, 0, 0, 0.0, "", has_chat_template=False, kind=AUDIO, audio=model.info)
        request = Generate(1, deep.prompt_for(ready), Sampling(), max_tokens=1)
        assert AudioIntake(model, lambda: None).job_now(request).work
