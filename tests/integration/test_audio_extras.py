"""Workers of audio models without PyAV, and without mlx-audio: the command that installs them, in each answer."""

import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from protocol.spec import WorkerSpec
from tests.gateway.harness import running
from tests.support.audio_models import build_moonshine, tone
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio
MISSING: Final = {"ear": "av", "bare": "mlx_audio"}


def without(spec: WorkerSpec) -> list[str]:
    """A worker that runs where a module is not installed."""
    command = default_command(spec)
    at = command.index("-m")
    main = f"import sys; sys.modules[{MISSING[spec.name]!r}] = None; from worker.main import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", main, *command[at + 2 :]]


async def test_what_is_missing_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    folder = str(build_moonshine(tmp_path / "m"))
    models = [ModelConfig(name=name, path=folder) for name in MISSING]
    with short_home() as home:
        async with running(home, models=models, command=without) as gateway:

            async def heard(clip: bytes, model: str = "ear") -> tuple[int, dict[str, str]]:
                reply = await gateway.client.post(
                    "/v1/audio/transcriptions", files={"file": ("a", clip)}, data={"model": model}
                )
                return reply.status_code, reply.json().get("error")

            assert await heard(tone(1.0)) == (200, None)
            status, error = await heard(b"ID3 and so on")
            assert (status, error["param"]) == (400, "file")
            assert error["message"] == (
                "Files other than WAV cannot be read here: PyAV is not installed; install it with: mlxctl setup audio."
            )
            ready = gateway.pool.worker("ear").ready
            assert ready is not None
            assert ready.audio is not None
            assert "mlxctl setup audio" in ready.audio.missing

            status, error = await heard(tone(1.0), "bare")
            assert (status, error["code"]) == (503, "model_unsupported")
            assert "mlx-audio is not installed; install it with: mlxctl setup audio" in error["message"]
