"""OpenAI's packages for Python and JavaScript with models that hear and speak: every route, in pieces and whole."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.config.settings import ModelConfig
from tests.clients.conftest import Workshop
from tests.clients.install import npm, pypi
from tests.clients.test_libraries import SCRIPTS
from tests.gateway.harness import serving
from tests.support.audio_models import build_qwen_tts, build_whisper, tone

pytestmark = pytest.mark.anyio
PYTHON: Final = "openai==3.54.0"
JAVASCRIPT: Final = "openai@7.57.0"


@pytest.fixture
async def studio(tmp_path: Path) -> AsyncGenerator[Workshop, None]:
    """A workshop with a model that hears, one that speaks, and a clip of more than one window."""
    models = [
        ModelConfig(name="whisper", path=str(build_whisper(tmp_path / "whisper"))),
        ModelConfig(name="speaker", path=str(build_qwen_tts(tmp_path / "speaker"))),
    ]
    (tmp_path / "clip.wav").write_bytes(tone(33.0))
    async with serving(*models) as gateway:
        yield Workshop(gateway, tmp_path, tmp_path, "")


def check(said: str, folder: Path, name: str) -> None:
    seen: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert seen["whole"]
    assert seen["streamed"] == seen["whole"]
    assert seen["done"] == [seen["whole"]]
    # Ten a second of what was heard.
    assert seen["tokens"] > 330
    assert seen["seconds"] == 33.0
    assert seen["segments"] > 0
    assert seen["words"] > 0
    assert isinstance(seen["translated"], str)
    assert " --> " in seen["again"]
    starts = {"wav": b"RIFF", "opus": b"OggS", "flac": b"fLaC", "mp3": b"\xff", "aac": b"\xff"}
    for kind, size in seen["spoken"].items():
        data = (folder / f"{name}.{kind}").read_bytes()
        assert len(data) == size > 100
        assert data.startswith(starts.get(kind, b"")), kind


async def test_openais_python_package_hears_and_speaks(studio: Workshop) -> None:
    python = pypi("openai", PYTHON) / "python"
    said = await studio.run([python, "-W", "ignore", SCRIPTS / "audio_with_openai.py", studio.url])
    check(said, studio.folder, "python")


async def test_openais_javascript_package_hears_and_speaks(studio: Workshop) -> None:
    packages = npm("openai-js", JAVASCRIPT).parent
    said = await studio.run(["node", SCRIPTS / "audio_with_openai.mjs", packages, studio.url])
    check(said, studio.folder, "javascript")
