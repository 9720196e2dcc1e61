import json
from pathlib import Path
from typing import Any

import pytest

from gateway.model_files.search import SHORTLIST
from tests.support.ctl import ctl
from tests.support.hub import Hub, Repo
from tests.support.scale import FULL

pytestmark = pytest.mark.usefixtures("cache")


def listed(home: Path, *words: str) -> list[dict[str, Any]]:
    done = ctl(home, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_search_lists_what_loads_and_fits_the_most_downloaded_first(tmp_path: Path) -> None:
    found = listed(tmp_path, "search", "QWEN3", "tiny")

    assert [model["repository"] for model in found] == ["org/tiny-qwen3-too", "mlx-community/tiny-qwen3"]
    assert all(model["is_usable"] and model["info"]["fits"] for model in found)
    assert found[0]["downloads"] == 80


def test_what_a_search_leaves_out_is_told_with_its_reason_and_info_says_the_same(hub: Hub, tmp_path: Path) -> None:
    done = ctl(tmp_path, "search", "qwen3")
    assert "4 more cannot be used here" in done.stderr
    assert "huge" not in done.stdout
    models = listed(tmp_path, "search", "qwen3", "--all")
    found = {model["repository"]: model["reason"] for model in models}

    assert found["org/huge-qwen3"].startswith("does not fit: its worker needs")
    assert found["org/foreign-qwen3"].endswith("the installed mlx-lm has no architecture 'unheard_of'")
    assert "GGUF" in found["org/gguf-qwen3"]
    assert "gated" in found["org/gated-qwen3"]
    # Its architecture was in the list: nothing else of it was asked for.
    assert not [request for request in hub.requests if "foreign" in request.path]
    for model in models if FULL else models[:3]:
        assert (ctl(tmp_path, "info", model["repository"]).returncode == 0) is model["is_usable"], model


def test_recommend_never_lists_what_info_refuses(hub: Hub, tmp_path: Path) -> None:
    small, large = SHORTLIST[-1].repository, SHORTLIST[0].repository
    hub.repos[small] = Repo(hub.repos["org/tiny-qwen3-too"].files)
    hub.repos[large] = Repo(hub.repos["org/huge-qwen3"].files, downloads=10**6)
    found = listed(tmp_path, "recommend")

    # Others of the own list are gone from this hub, and with them their recommendation.
    assert [model["repository"] for model in found] == [small, "mlx-community/tiny-qwen3"]
    assert found[0]["purpose"] == SHORTLIST[-1].purpose
    for model in found:
        assert ctl(tmp_path, "info", model["repository"]).returncode == 0


def test_without_a_network_the_own_list_is_judged_by_the_same_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "mlxd.toml").write_text('[memory]\nbudget = "8GiB"\n')
    done = ctl(tmp_path, "recommend", "--json")
    found = json.loads(done.stdout)

    assert "no connection to" in done.stderr
    assert "short list" in done.stderr
    assert {model["repository"] for model in found} < {known.repository for known in SHORTLIST}
    assert all(model["info"]["weights_bytes"] < model["info"]["available_bytes"] for model in found)
    searched = ctl(tmp_path, "search", "coder", "--all")
    assert "Qwen3-Coder-Next-4bit" in searched.stdout
    assert "does not fit" in searched.stdout


def test_a_search_that_finds_nothing_ends_with_1(tmp_path: Path) -> None:
    done = ctl(tmp_path, "search", "nosuchmodel")

    assert (done.returncode, done.stdout) == (1, "")
    assert "no model for nosuchmodel" in done.stderr
