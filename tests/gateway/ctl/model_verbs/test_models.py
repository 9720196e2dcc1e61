"""`mlxctl models` and `mlxctl ps`."""

import json
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from gateway.control_types import DaemonStatus, ModelStatus
from gateway.ctl import tables
from gateway.ctl.tables import compare
from tests.gateway.model_files.test_metadata import PLAIN, folder
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

TIB = 1 << 40
DEADLINE_S = 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one model of a mebibyte, and one that no machine of ours holds."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for name, size in (("small", 1 << 20), ("huge", TIB)):
        root = cache / f"models--org--{name}"
        snapshot = root / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("abc")
        config = PLAIN | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1000}
        folder(snapshot, {"w": ("U32", size)}, config)
        (snapshot / "tokenizer.json").write_text("{}")
    return cache


def listed(home: Path) -> dict[str, dict[str, object]]:
    done = ctl(home, "models", "--json")
    assert done.returncode == 0, done.stderr
    return {model["name"]: model for model in json.loads(done.stdout)}


def test_without_a_daemon_the_files_tell_what_there_is_and_what_fits(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text('[models.mine]\npath = "org/small"\naliases = ["x"]\n[models.gone]\n')
    found = listed(tmp_path)

    assert list(found) == ["mine", "gone", "org/huge"]
    mine, gone, huge = found.values()
    assert (mine["state"], mine["size_bytes"], mine["context"], mine["fits"]) == ("stopped", 1 << 20, 1000, True)
    assert mine["aliases"] == ["x"]
    assert gone["fits"] is None
    assert "mlxctl pull gone" in str(gone["verdict"])
    assert (huge["state"], huge["memory_bytes"], huge["fits"]) == ("not configured", TIB, False)
    table = ctl(tmp_path, "models").stdout.splitlines()
    assert table[0].split() == ["MODEL", "STATE", "DISK", "MEMORY", "CONTEXT", "FITS", "ALIASES", "PATH"]
    assert table[1].split() == ["mine", "stopped", "1.0", "MiB", "1.0", "MiB", "1000", "yes", "x", "org/small"]


@pytest.fixture
def daemon(cache: Path, tmp_path: Path) -> Generator[DaemonProcess, None, None]:
    (tmp_path / "mlxd.toml").write_text(
        '[server]\nport = 0\n[models.a]\npath = "org/small"\n[models.b]\npath = "demo"\n'
    )
    with DaemonProcess(tmp_path, "--step-ms 20") as running:
        yield running


def test_the_daemon_tells_what_runs_and_how_fast(daemon: DaemonProcess) -> None:
    assert "No model has a process" in ctl(daemon.home, "ps").stdout
    assert json.loads(ctl(daemon.home, "ps", "--json").stdout) == []
    body = {"model": "a", "prompt": "hi", "max_tokens": 1_000_000, "stream": True}
    found: list[dict[str, object]] = []
    end = time.monotonic() + patient(DEADLINE_S)
    with daemon.client.stream("POST", "/v1/completions", json=body):
        while not found or not found[0]["tokens_per_s"]:
            assert time.monotonic() < end, found
            found = json.loads(ctl(daemon.home, "ps", "--json").stdout)
    states = {name: model["state"] for name, model in listed(daemon.home).items()}

    assert [model["name"] for model in found] == ["a"]
    assert found[0]["pid"] in daemon.worker_pids()
    assert states == {"a": "ready", "b": "stopped", "org/huge": "not configured"}


def status(**counts: int | str) -> DaemonStatus:
    fields = {
        name: kind() for name, kind in ModelStatus.__annotations__.items() if kind in (str, int, float)
    } | {"name": "a", "aliases": (), "pid": 1, "state": "ready"}  # fmt: skip
    return DaemonStatus("1", 1, 1.0, "", "", "", False, [ModelStatus(**(fields | counts))])


def test_rates_are_of_what_happened_between_two_looks() -> None:
    first = status(generation_tokens=100)
    found = compare(first, status(generation_tokens=150, prompt_tokens=80, prompt_tokens_cached=20, inside=3), 0.5)

    assert (found.tokens_per_s, found.models[0].tokens_per_s, found.waiting) == (100.0, 100.0, 3)
    assert found.models[0].cache_hit_rate == 0.25
    # A model that has begun anew, or a daemon.
    assert compare(status(generation_tokens=500), first, 0.5).tokens_per_s == 0.0
    assert compare(first, first, 0.0).tokens_per_s == 0.0
    assert compare(first, first, 1.0).models[0].cache_hit_rate is None


def test_what_a_model_gave_up_to_be_exact_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = status(batch_mode="single", batch_mode_reason="requests run one at a time, because of its caches")
    tables.notes(compare(said, said, 0.0).models)

    assert capsys.readouterr().out == "a: requests run one at a time, because of its caches\n"


def test_sparse_prefills_stand_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    said = status(sparse_prompts=3, sparse_prompt_tokens=30_000, sparse_kept_tokens=7_600)
    tables.notes(compare(said, said, 0.0).models)

    assert capsys.readouterr().out == "a: 3 prompts prefilled sparsely, 25 % of 30000 tokens kept\n"


def test_why_attention_is_not_by_the_kernel_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for attention in ("kernel", "mlx", "mlx, because its kernel is off by 0.9 on this machine"):
        said = status(attention=attention)
        tables.notes(compare(said, said, 0.0).models)
    assert capsys.readouterr().out.splitlines() == [
        "a: attention by mlx, because its kernel is off by 0.9 on this machine"
    ]


def test_what_drafts_win_stands_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    works = status(speculation="auto", drafted_tokens=2000, accepted_tokens=1610, draft_gain=2.314)
    began = status(drafted_tokens=1, accepted_tokens=1, draft_gain=0.66)
    off = status(speculation="off, because rows run in the batch mode single")
    beside = status(speculation="auto, with drafts by b")
    for said in (works, began, off, beside, status(speculation="auto"), status(speculation="off")):
        tables.notes(compare(said, said, 0.0).models)

    assert capsys.readouterr().out.splitlines() == [
        "a: 2000 tokens drafted, 80 % right; steps with drafts give 2.31 × the tokens a second of steps without",
        "a: 1 token drafted, 100 % right",
        "a: speculation is off, because rows run in the batch mode single",
        "a: speculation is auto, with drafts by b",
    ]
