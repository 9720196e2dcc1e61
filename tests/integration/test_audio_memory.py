"""Memory of audio models under the broker: grants, evictions, and clips that the memory of a model cannot hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.audio_models import build_moonshine, tone
from tests.support.daemon import DaemonProcess
from tests.support.pool import short_home
from tests.support.reading_models import build_embedder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    hears, reads = build_moonshine(tmp_path / "hears"), build_embedder("bert", tmp_path / "reads")
    models = {"ear": (hears, "100MiB"), "embed": (reads, "250MiB"), "big": (hears, "1GiB")}
    tables = "".join(
        f'[models.{name}]\npath = "{path}"\nmemory = "{share}"\n' for name, (path, share) in models.items()
    )
    with short_home() as home:
        (home / "mlxd.toml").write_text(f'[server]\nport = 0\n[memory]\nbudget = "320MiB"\n{tables}')
        with DaemonProcess(home, module="tests.support.quick_daemon") as made:
            yield made


def heard(daemon: DaemonProcess, clip: bytes, model: str = "ear") -> httpx2.Response:
    return daemon.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", clip)}, data={"model": model})


def states(daemon: DaemonProcess) -> dict[str, str]:
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))) as admin:
        models: list[dict[str, Any]] = admin.get("http://mlxd/v1/status").json()["models"]
    return {model["name"]: model["state"] for model in models}


@pytest.mark.soak
def test_audio_models_are_granted_memory_give_it_back_and_take_no_clip_beyond_it(daemon: DaemonProcess) -> None:
    assert heard(daemon, tone(1.0)).status_code == 200
    embedded = daemon.client.post("/v1/embeddings", json={"model": "embed", "input": "kato"})
    assert embedded.status_code == 200
    assert states(daemon) == {"ear": "stopped", "embed": "ready", "big": "stopped"}
    assert heard(daemon, tone(1.0)).status_code == 200
    assert states(daemon) == {"ear": "ready", "embed": "stopped", "big": "stopped"}

    refused = heard(daemon, tone(1.0), "big")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_does_not_fit"
    assert "1.0 GiB" in refused.json()["error"]["message"]

    # Half of the samples a second that the model hears: a file of 4 MB has 16 MiB of them, and some.
    long = heard(daemon, tone(270.0, rate=8_000))
    assert (long.status_code, long.json()["error"]["code"], long.json()["error"]["param"]) == (
        400, "invalid_audio", "file",
    )  # fmt: skip
    assert "room for 16 MiB" in long.json()["error"]["message"]
    assert states(daemon)["ear"] == "ready"
