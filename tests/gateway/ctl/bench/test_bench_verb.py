import json
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from gateway.access.key import Key, KeyFile
from gateway.ctl.bench.closed_loop import Prompts
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config
from tests.support.reading_models import build_embedder, build_reranker


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """Of a daemon that asks for keys."""
    home = tmp_path_factory.mktemp("h")
    write_config(home)
    KeyFile(home / "keys" / "keys.json").create(Key(name="alice", prefix="", salt="", hash=""))
    with DaemonProcess(home):
        yield home


def test_every_round_is_measured_with_as_many_clients_as_asked_and_without_a_key(home: Path) -> None:
    words = "--concurrency 1,3 --tokens 7 --prompt-tokens 20 --requests 2 --json"
    done = ctl(home, "bench", "a", *words.split())
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert [(one["concurrency"], one["requests"], one["errors"]) for one in found["reports"]] == [(1, 2, 0), (3, 6, 0)]
    assert [one["completion_tokens"] for one in found["reports"]] == [14, 42]
    assert all(one["ttft_ms"]["p50"] > 0 and one["tokens_per_s"] > 0 for one in found["reports"])


def test_people_get_a_table(home: Path) -> None:
    done = ctl(home, "bench", "a", "--concurrency", "2", "--tokens", "3", "--requests", "1")

    assert done.stdout.splitlines()[0].split()[:4] == ["clients", "requests", "errors", "tok/s"]
    assert done.stdout.splitlines()[1].split()[:3] == ["2", "2", "0"]


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["nope"], 1, "The model 'nope' does not exist"),
        (["a", "--concurrency", "1,x"], 2, "write numbers from 1 up"),
        (["a", "--concurrency", "0"], 2, "write numbers from 1 up"),
    ],
)
def test_what_cannot_be_measured_is_said(home: Path, words: list[str], status: int, reason: str) -> None:
    done = ctl(home, "bench", *words)

    assert done.returncode == status
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_daemon_there_is_nothing_to_measure(tmp_path: Path) -> None:
    assert ctl(tmp_path, "bench", "a").returncode == 3


def test_a_prompt_without_a_tokenizer_is_as_long_as_words_are_said_to_be() -> None:
    assert len(Prompts(0, tokens_per_word=2.0).make(100).split()) == 50
    assert len(Prompts(0).make(150).split()) == 100


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Path]:
    """The home of a daemon with real workers of models that read."""
    models = (("reader", build_embedder), ("judge", build_reranker))
    tables = [f'[models.{name}]\npath = "{build("bert", tmp_path / name)}"\n' for name, build in models]
    (tmp_path / "mlxd.toml").write_text("".join(["[server]\nport = 0\n", *tables]))
    with DaemonProcess(tmp_path, module="gateway.main"):
        yield tmp_path


def test_embeddings_are_measured_by_their_texts_and_scores_of_pairs_are_not(readers: Path) -> None:
    done = ctl(readers, "bench", "reader", "--concurrency", "2", "--prompt-tokens", "12", "--requests", "2", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["reports"]
    assert (report["requests"], report["errors"], report["completion_tokens"]) == (4, 0, 0)
    assert report["prompt_tokens"] > 4
    assert report["tokens_per_s"] > report["requests_per_s"] > 0

    # The default prompt is longer than any input of this model.
    done = ctl(readers, "bench", "reader", "--concurrency", "1", "--requests", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reports"][0]["prompt_tokens"] == 120

    refused = ctl(readers, "bench", "judge")
    assert refused.returncode == 1
    assert "scores pairs of texts" in refused.stderr
