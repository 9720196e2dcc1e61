"""Times that workers have measured, as the daemon uses and shows them: estimates of a load, rows, speeds."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.admin.endpoints import StatusEndpoint
from gateway.config.settings import ModelConfig, ServerConfig
from gateway.request.model_load import LOAD_S
from protocol import wisdom
from protocol.wisdom import FORMAT, Calibration, LoadFacts, Wisdom, wisdom_dir
from tests.gateway.harness import chat, running, serving, until
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio


def kept(load_s: float) -> Wisdom:
    load = LoadFacts(load_s, 0.5, 100, 200, 8, 0)
    return Wisdom(format=FORMAT, key="a" * 20, model="m", path="m", machine="", written=1.0, load=load)


async def test_a_client_that_waited_in_vain_is_told_when_the_model_will_be_there() -> None:
    with short_home() as home:
        wisdom.write(wisdom_dir(home), kept(load_s=60.0))
        async with running(home, ["--hang-on-load"], server=ServerConfig(queue_timeout_s=0.3)) as gateway:
            late = await gateway.client.post("/v1/chat/completions", json=chat())
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "queue_timeout"
            assert 50 <= int(late.headers["retry-after"]) <= 60


async def test_a_load_is_expected_to_take_what_the_one_before_took() -> None:
    with short_home() as home:
        async with running(home) as gateway:
            meter, model = gateway.app.services.meter, gateway.app.services.config.models["m"]
            assert meter.read(model).load_s == LOAD_S
        wisdom.write(wisdom_dir(home), kept(load_s=42.0))
        async with running(home) as gateway:
            meter, model = gateway.app.services.meter, gateway.app.services.config.models["m"]
            assert meter.read(model).load_s == 42.0


async def test_a_worker_leaves_its_times_and_the_next_one_runs_as_many_rows_as_a_calibration_says(
    model_folder: Callable[[str], Path],
) -> None:
    model = ModelConfig(name="m", path=str(model_folder("qwen3")), max_running="auto")
    async with serving(model) as gateway:
        folder = wisdom_dir(gateway.app.services.config.home)
        status = StatusEndpoint(gateway.app.services)
        body = chat("word " * 60, temperature=1, seed=3, max_tokens=60, ignore_eos=True)
        first = await gateway.client.post("/v1/chat/completions", json=body)
        assert status.status().models[0].slots == 16
        await gateway.pool.unload("m")
        (file,) = folder.glob("m-*.json")
        learned = wisdom.read(file)
        assert learned.load is not None
        assert learned.load.weights_bytes > 0
        assert learned.load.token_bytes > 0
        assert learned.chunks
        calibration = Calibration(1.0, (), (), 3, 1 << 28)
        wisdom.write(folder, msgspec.structs.replace(learned, calibration=calibration))

        again = await gateway.client.post("/v1/chat/completions", json=body)
        assert again.json()["choices"] == first.json()["choices"]
        shown = status.status().models[0]
        assert shown.slots == 3
        gateway.pool.times._answers.clear()
        shown = status.status().models[0]
        assert shown.measured is not None
        assert (shown.measured.max_running, shown.measured.calibrated_at) == (3, 1.0)
        assert shown.measured.load_s > 0
        await until(lambda: gateway.pool.worker("m").is_ready)
