"""`mlxctl pull` and `info` against a hub on a socket of this machine."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from gateway.model_files.hub_cache import cached_models
from tests.support.ctl import ctl
from tests.support.hub import COMMIT, Hub, Repo, model_repo
from tests.support.scale import patient

TOKEN = "hf_secret_of_alice"
DEADLINE_S = 30


@pytest.fixture
def hub(model_folder: Callable[[str], Path]) -> Generator[Hub, None, None]:
    with Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as running:
        yield running


def weights(hub: Hub, repository: str = "org/tiny") -> bytes:
    return hub.repos[repository].files["model.safetensors"]


def snapshot(cache: Path, repository: str = "org/tiny") -> Path:
    return cache / f"models--{repository.replace('/', '--')}" / "snapshots" / COMMIT


def part_of(hub: Hub, cache: Path) -> Path:
    """Path of the weights during their download."""
    sha = hub.repos["org/tiny"].entry("model.safetensors")["lfs"]["oid"]
    part = cache / "models--org--tiny" / "blobs" / f"{sha}.incomplete"
    part.parent.mkdir(parents=True)
    return part


def test_a_model_is_downloaded_whole_and_said_beforehand_what_it_needs(hub: Hub, cache: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("org/tiny: qwen3, not downloaded")
    assert any(line.startswith("KV ") for line in lines)
    assert any("are free in" in line for line in lines)
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)
    assert (snapshot(cache) / "tokenizer.json").exists()
    # Nothing that MLX does not read.
    assert not (snapshot(cache) / "README.md").exists()
    # As everybody who looks into that cache finds it, the daemon among them.
    assert cached_models({"HF_HUB_CACHE": str(cache)}) == ["org/tiny"]
    assert "Serve it: mlxctl serve" in done.stdout
    assert not list(cache.rglob("*.incomplete"))


def test_a_second_pull_downloads_nothing(hub: Hub, cache: Path, tmp_path: Path) -> None:
    ctl(tmp_path, "pull", "org/tiny")
    asked = len(hub.asked_for("model.safetensors"))
    done = ctl(tmp_path, "pull", "org/tiny", "--json")

    found = json.loads(done.stdout)
    assert found["downloaded_bytes"] == 0
    assert found["path"] == str(snapshot(cache))
    # The headers alone, to say again whether it fits.
    assert [one.range for one in hub.asked_for("model.safetensors")[asked:]] == ["bytes=0-100000"]


def test_a_connection_that_breaks_is_taken_up_where_it_was(hub: Hub, cache: Path, tmp_path: Path) -> None:
    # The first answer is for the header.
    hub.cuts["model.safetensors"] = [200_000, 50_000, 30_000]
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    assert [one.range for one in hub.asked_for("model.safetensors")[1:]] == ["", "bytes=50000-", "bytes=80000-"]
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


@pytest.mark.parametrize(("end", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_pull_that_was_ended_goes_on_in_the_next(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals, status: int
) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
    hub.stalls["model.safetensors"] = 60_000
    command = [sys.executable, "-P", "-c", "from gateway.ctl import main; main()", "pull", "org/tiny"]
    pull = subprocess.Popen(command, env=os.environ | {"MLXD_HOME": str(tmp_path)}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + patient(DEADLINE_S)
    while sum(part.stat().st_size for part in cache.rglob("*.incomplete")) < 60_000:
        assert time.monotonic() < deadline
        assert pull.poll() is None
    pull.send_signal(end)
    assert pull.wait(patient(DEADLINE_S)) == status
    # Half a model is none.
    assert cached_models({"HF_HUB_CACHE": str(cache)}) == []
    hub.stalls.clear()
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    assert "of them here" in done.stdout
    assert hub.asked_for("model.safetensors")[-1].range == "bytes=60000-"
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


def test_a_server_that_knows_no_ranges_begins_the_file_anew(hub: Hub, cache: Path, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = [len(weights(hub)), 50_000]
    hub.ignores_ranges = True
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


def test_what_was_damaged_on_its_way_is_thrown_away(hub: Hub, cache: Path, tmp_path: Path) -> None:
    part = part_of(hub, cache)
    part.write_bytes(b"\0" * 1000)
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 1
    assert "model.safetensors was damaged in transit" in done.stderr
    assert not part.exists()
    assert ctl(tmp_path, "pull", "org/tiny").returncode == 0


def test_what_came_whole_and_was_not_put_in_its_place_is_not_downloaded_again(
    hub: Hub, cache: Path, tmp_path: Path
) -> None:
    part_of(hub, cache).write_bytes(weights(hub))
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    # The headers alone.
    assert [one.range for one in hub.asked_for("model.safetensors")] == ["bytes=0-100000"]
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


def test_what_is_longer_than_the_file_is_begun_anew(hub: Hub, cache: Path, tmp_path: Path) -> None:
    part_of(hub, cache).write_bytes(weights(hub) + b"more")
    done = ctl(tmp_path, "pull", "org/tiny", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["downloaded_bytes"] >= len(weights(hub))
    assert [one.range for one in hub.asked_for("model.safetensors")] == ["bytes=0-100000", ""]
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


def test_a_disk_that_is_too_small_is_said_with_numbers_before_a_byte(hub: Hub, cache: Path, tmp_path: Path) -> None:
    hub.repos["org/tiny"].lies["model.safetensors"] = 40 << 50
    done = ctl(tmp_path, "pull", "org/tiny", "--yes")

    assert done.returncode == 1
    assert "needs 40960.0 TiB more, and" in done.stderr
    assert "free in" in done.stderr
    assert not cache.exists()


def test_only_what_was_asked_for_is_downloaded(hub: Hub, cache: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "pull", "org/tiny", "--include", "*.json", "--include", "README.md", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(snapshot(cache))
    assert (snapshot(cache) / "README.md").exists()
    assert not (snapshot(cache) / "model.safetensors").exists()
    assert "no file of org/tiny matches *.xyz" in ctl(tmp_path, "pull", "org/tiny", "--include", "*.xyz").stderr


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"model.gguf": b"x"}, "no config.json"),
        ({"config.json": b'{"model_type": "llama"}', "m.gguf": b"x"}, "GGUF"),
        ({"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b"x"}, "PyTorch"),
        ({"config.json": b'{"model_type": "no_such"}', "model.safetensors": b"\2" + b"\0" * 7 + b"{}"}, "'no_such'"),
    ],
)
def test_what_mlx_cannot_load_is_not_downloaded_unless_asked_twice(
    hub: Hub, cache: Path, tmp_path: Path, files: dict[str, bytes], reason: str
) -> None:
    hub.repos["org/other"] = Repo(files)
    done = ctl(tmp_path, "pull", "org/other", "--include", "*")

    assert done.returncode == 1
    assert reason in done.stderr
    assert "--yes downloads it anyway" in done.stderr
    assert not cache.exists()
    assert ctl(tmp_path, "pull", "org/other", "--include", "*", "--yes").returncode == 0
    assert all((snapshot(cache, "org/other") / name).exists() for name in files)


@pytest.mark.parametrize(
    ("repository", "reason"),
    [
        ("org/nope", "has no repository org/nope"),
        ("org/tiny@v9", "org/tiny has no revision 'v9'"),
        ("org/gated", "org/gated is gated: ask for access at"),
        ("not a name", "is not the name of a repository"),
    ],
)
def test_why_there_is_nothing_is_one_sentence(
    hub: Hub, cache: Path, tmp_path: Path, repository: str, reason: str
) -> None:
    hub.repos["org/gated"] = Repo(dict(hub.repos["org/tiny"].files), is_gated=True)
    for verb in ("pull", "info"):
        done = ctl(tmp_path, verb, repository)

        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        if verb == "pull" or "/" in repository:
            assert reason in done.stderr


def test_without_a_network_that_is_said(hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said = ctl(tmp_path, "pull", "org/tiny").stderr
    assert "no connection to http://127.0.0.1:9" in said
    assert said.endswith("; without it: mlxctl run demo or mlxctl run demo-vision\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in ctl(tmp_path, "pull", "org/tiny").stderr


def test_the_token_is_that_of_the_environment_and_is_never_shown(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/private"] = Repo(dict(hub.repos["org/tiny"].files), token=TOKEN)
    # One that somebody else's tool has stored is not ours to send.
    stored = cache.parent / "hf" / "token"
    stored.parent.mkdir()
    stored.write_text(TOKEN)
    refused = ctl(tmp_path, "pull", "org/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = ctl(tmp_path, "pull", "org/private", "--json")
    hub.repos["org/private"].token = "another"
    wrong = ctl(tmp_path, "pull", "org/private")

    assert "a private one that needs a token in HF_TOKEN" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert "the account of HF_TOKEN may not see" in wrong.stderr
    assert all(TOKEN not in one.stdout + one.stderr for one in (refused, done, wrong))


def test_the_token_does_not_go_to_whoever_the_hub_sends_us_to(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/tiny"].token = TOKEN
    hub.has_cdn = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 0, done.stderr
    elsewhere = [one for one in hub.requests if one.path.startswith("/cdn/")]
    assert len(elsewhere) == 2
    assert {one.authorization for one in elsewhere} == {""}
    assert (snapshot(cache) / "model.safetensors").read_bytes() == weights(hub)


def test_two_do_not_write_one_file(hub: Hub, cache: Path, tmp_path: Path) -> None:
    with part_of(hub, cache).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = ctl(tmp_path, "pull", "org/tiny")

    assert done.returncode == 1
    assert "model.safetensors is being downloaded by another process" in done.stderr


def test_another_revision_is_served_by_its_folder(hub: Hub, cache: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "pull", f"org/tiny@{COMMIT}")

    assert done.returncode == 0, done.stderr
    assert f'path = "{snapshot(cache)}"' in done.stdout
    # The name still stands for what it stood for: nothing.
    assert cached_models({"HF_HUB_CACHE": str(cache)}) == []


def test_info_says_the_same_of_a_model_before_and_after_it_is_downloaded(hub: Hub, cache: Path, tmp_path: Path) -> None:
    before = json.loads(ctl(tmp_path, "info", "org/tiny", "--json").stdout)
    asked = [one.range for one in hub.asked_for("model.safetensors")]
    ctl(tmp_path, "pull", "org/tiny")
    after = json.loads(ctl(tmp_path, "info", "org/tiny", "--json").stdout)

    assert asked == ["bytes=0-100000"]
    assert not before["is_downloaded"]
    assert after["is_downloaded"]
    same = ("model_type", "weights_bytes", "disk_bytes", "kv_1k_bytes", "context", "fits")
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    assert before["weights_bytes"] > 0
    assert before["kv_1k_bytes"] > 0
