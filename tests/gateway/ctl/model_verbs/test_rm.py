"""`mlxctl rm`, on a cache that `mlxctl pull` has filled, or that looks so."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess

SIZE = 3000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two repositories of one commit, as a copy on the hub has it."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for name in ("org--one", "org--two"):
        root = cache / f"models--{name}"
        snapshot = root / "snapshots" / ("a" * 40)
        for folder in (snapshot, root / "refs", root / "blobs"):
            folder.mkdir(parents=True)
        (root / "refs" / "main").write_text("a" * 40)
        (root / "blobs" / "f00").write_bytes(b"x" * SIZE)
        (root / "blobs" / "ba4.incomplete").write_bytes(b"x" * 500)
        (snapshot / "model.safetensors").symlink_to("../../blobs/f00")
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
    return cache


def repositories(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("models--*"))


def test_a_model_is_removed_with_what_is_left_of_broken_downloads_and_no_other_is(cache: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "rm", "org/one", "--yes", "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"repository": "org/one", "freed_bytes": SIZE + 500}
    assert repositories(cache) == ["models--org--two"]
    assert (cache / "models--org--two" / "snapshots" / ("a" * 40) / "model.safetensors").stat().st_size == SIZE


def test_nothing_is_removed_without_a_yes(cache: Path, tmp_path: Path) -> None:
    done = ctl(tmp_path, "rm", "org/one")

    assert done.returncode == 1
    assert done.stderr == "mlxctl: org/one holds 3.4 KiB; --yes removes it\n"
    assert len(repositories(cache)) == 2


def test_what_broke_before_its_first_file_was_whole_is_removed_as_well(cache: Path, tmp_path: Path) -> None:
    part = cache / "models--org--three" / "blobs" / "ba4.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x")

    assert ctl(tmp_path, "rm", "org/three", "-y").returncode == 0
    assert not part.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("default", "the demo models are part of mlxd"),
        ("org/nope", "org/nope is not in the Hugging Face cache"),
        ("{home}", "is a folder outside of the Hugging Face cache"),
        ("./nope", "there is no model ./nope"),
    ],
)
def test_what_is_not_ours_to_remove_is_said(cache: Path, tmp_path: Path, name: str, reason: str) -> None:
    done = ctl(tmp_path, "rm", name.format(home=tmp_path), "--yes")

    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert len(repositories(cache)) == 2


@pytest.fixture
def daemon(cache: Path, tmp_path: Path) -> Generator[DaemonProcess, None, None]:
    snapshot = cache / "models--org--two" / "snapshots" / ("a" * 40)
    (tmp_path / "mlxd.toml").write_text(
        f'[server]\nport = 0\n[models.one]\npath = "org/one"\naliases = ["first"]\n[models.two]\npath = "{snapshot}"\n'
    )
    with DaemonProcess(tmp_path) as running:
        yield running


def test_what_the_daemon_has_loaded_stays_until_it_is_unloaded(daemon: DaemonProcess, cache: Path) -> None:
    for name in ("one", "two"):
        assert ctl(daemon.home, "load", name).returncode == 0
        refused = ctl(daemon.home, "rm", name, "--yes")
        assert refused.returncode == 1
        assert refused.stderr.endswith(f"is loaded as {name}; first: mlxctl unload {name}\n")
    assert len(repositories(cache)) == 2
    assert ctl(daemon.home, "unload", "one").returncode == 0

    done = ctl(daemon.home, "rm", "first", "--yes")
    assert done.stdout == "org/one is removed: 3.4 KiB are free again\n"
    assert "still has it as one" in done.stderr
