"""Times that workers have measured, as the daemon uses and shows them: estimates of a load, rows, speeds."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.config.settings import ModelConfig, ServerConfig
from gateway.control.endpoints import DaemonEndpoints
from gateway.workers.memory.estimate import estimate
from gateway.workers.supervisor.spawn import default_command
from protocol import timing_profile
from protocol.spec import WorkerSpec
from protocol.timing_profile import FORMAT, Calibration, LoadFacts, TimingProfile, profiles_dir
from tests.gateway.harness import chat, running, serving, until
from tests.support.audio_models import build_moonshine
from tests.support.pool import short_home
from tests.support.reading_models import build_embedder
from tests.support.scale import scaled
from worker.engine.scheduling.timing_profile_file import keep_load

pytestmark = pytest.mark.anyio


def kept(load_s: float) -> TimingProfile:
    load = LoadFacts(load_s, 0.5, 100, 200, 8, 0)
    return TimingProfile(format=FORMAT, key="a" * 20, model="m", path="m", machine="", written=1.0, load=load)


async def test_a_client_that_waited_in_vain_is_told_when_the_model_will_be_there() -> None:
    with short_home() as home:
        timing_profile.write(profiles_dir(home), kept(load_s=60.0))
        async with running(home, ["--hang-on-load"], server=ServerConfig(queue_timeout_s=0.3)) as gateway:
            late = await gateway.client.post("/v1/chat/completions", json=chat())
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "queue_timeout"
            assert 50 <= int(late.headers["retry-after"]) <= 60


async def test_a_worker_leaves_its_times_and_the_next_one_runs_as_many_rows_as_a_calibration_says(
    model_folder: Callable[[str], Path],
) -> None:
    model = ModelConfig(name="m", path=str(model_folder("qwen3")), max_running="auto")
    async with serving(model) as gateway:
        folder = profiles_dir(gateway.app.services.config.home)
        status = DaemonEndpoints(gateway.app.services)
        body = chat("word " * 60, temperature=1, seed=3, max_tokens=60, ignore_eos=True)
        first = await gateway.client.post("/v1/chat/completions", json=body)
        assert status.status().models[0].slots == 16
        await gateway.pool.unload("m")
        (file,) = folder.glob("m-*.json")
        learned = timing_profile.read(file)
        assert learned.load is not None
        assert learned.load.weights_bytes > 0
        assert learned.load.token_bytes > 0
        assert learned.passes
        calibration = Calibration(1.0, (), (), 3, 1 << 28)
        timing_profile.write(folder, msgspec.structs.replace(learned, calibration=calibration))

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


@pytest.mark.parametrize("kind", scaled(["embed", "audio"], ["embed"]))
async def test_a_load_of_a_model_without_tokens_is_known_after_a_restart(kind: str, tmp_path: Path) -> None:
    folder = build_embedder("bert", tmp_path / "m") if kind == "embed" else build_moonshine(tmp_path / "m")
    models = [ModelConfig(name="m", path=str(folder))]
    with short_home() as home:
        async with running(home, models=models, command=default_command) as gateway:
            assert gateway.pool.times.load_s("m", str(folder)) == 0.0
            unmeasured = estimate(models[0], 0)
            await gateway.pool.load("m")
            ready = gateway.pool.worker("m").ready
            assert ready is not None
        async with running(home, models=models, command=default_command) as gateway:
            (file,) = profiles_dir(home).glob("m-*.json")
            load = timing_profile.read(file).load
            assert load is not None
            assert load.seconds >= load.warm_up_s > 0
            assert load.weights_bytes == ready.weights_bytes
            assert gateway.pool.times.load_s("m", str(folder)) == load.seconds
            # It takes more than its files tell: libraries.
            known = gateway.pool.times.of("m", str(folder))
            assert known is not None
            assert estimate(models[0], 0, known.load).floor >= max(unmeasured.floor, load.footprint_bytes)
            shown = DaemonEndpoints(gateway.app.services).status().models[0]
            assert shown.measured is not None
            assert shown.measured.load_s == load.seconds


def test_files_that_cannot_be_read_cost_a_line_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"short")
    monkeypatch.setenv(timing_profile.FOLDER_ENV, str(tmp_path / "kept"))
    with caplog.at_level("WARNING", logger="mlxd.worker"):
        keep_load(WorkerSpec("m", "m", 1, "", ""), tmp_path, LoadFacts(1.0, 0.5, 1, 2))
    assert "facts of the load are not kept" in caplog.text
    assert not (tmp_path / "kept").exists()
