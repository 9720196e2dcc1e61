"""Warm prompts on scripted workers: what they must not do to the life of a model."""

import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.state import State
from tests.gateway.harness import Gateway, running, until

pytestmark = pytest.mark.anyio
ENDLESS, SHORT = json.dumps([["progress"]]), "hi"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway, None]:
    files = [tmp_path / f"{name}.json" for name in ("endless", "short")]
    for file, said in zip(files, (ENDLESS, SHORT), strict=True):
        file.write_text(json.dumps({"messages": [{"role": "user", "content": said}]}))
    model = ModelConfig(name="m", path="m", warm=tuple(map(str, files)))
    async with running(tmp_path, models=[model], worker="talkative") as started:
        await started.pool.load("m")
        await until(lambda: started.link.in_flight > 0)
        yield started


async def test_a_prompt_during_which_the_worker_is_lost_is_not_tried_again(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = gateway.pool.worker("m").epoch
    os.kill(gateway.pool.worker("m").pid, signal.SIGKILL)
    await until(lambda: gateway.pool.worker("m").state is not State.READY)
    await gateway.pool.load("m")
    await until(lambda: not gateway.app.warm_up.is_busy)

    assert gateway.pool.worker("m").epoch > first
    told = [record.getMessage() for record in caplog.records]
    assert any("was lost while it prefilled" in line and "endless.json" in line for line in told)
    assert any("short.json is cached" in line for line in told)
    assert not any("endless.json is cached" in line for line in told)


async def test_an_unload_and_a_drain_do_not_wait_for_a_warm_prompt(gateway: Gateway) -> None:
    await gateway.pool.unload("m")
    assert gateway.link.in_flight == 0
    await gateway.pool.load("m")
    await until(lambda: gateway.link.in_flight > 0)
    gateway.app.drain()
    await until(lambda: gateway.link.in_flight == 0)
