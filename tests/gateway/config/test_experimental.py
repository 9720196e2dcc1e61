"""Experimental features: which settings use them, and where they are named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.config import experimental
from gateway.config.experimental import (
    ASSISTANT,
    BLOCK,
    DUTY_CYCLE,
    EAGLE,
    EXPERIMENTS,
    EXPERTS,
    JACCL_GROUP,
    KV_EVENTS,
    SIGNS,
    SPARSE,
    Experiment,
    experiments_of,
)
from gateway.config.settings import GroupConfig, ModelConfig, ServerConfig
from gateway.ctl.hub import print_info
from gateway.model_files.metadata import ModelMetadata
from tests.gateway.harness import chat, running
from tests.support.daemon import ROOT
from worker.speculation.drafters.proposers import _ATTACHED  # pyright: ignore[reportPrivateUsage]

OFF = ServerConfig(desktop=False)


def model(**settings: Any) -> ModelConfig:
    return ModelConfig(name="m", path="m", **settings)


@pytest.mark.parametrize("each", EXPERIMENTS, ids=str)
def test_the_page_of_an_experimental_feature_names_it(each: Experiment) -> None:
    lines = (ROOT / "docs" / each.page).read_text().splitlines()
    assert any(line.startswith("**Experimental: ") and each.name in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sparse_prefill": 0.5}, SPARSE),
        ({"group": GroupConfig(("local", "local"), backend="jaccl")}, JACCL_GROUP),
        ({"experts": "disk"}, EXPERTS),
        ({"kv_events": "tcp://127.0.0.1:5557"}, KV_EVENTS),
    ],
    ids=str,
)
def test_a_setting_that_uses_an_experimental_feature_is_known(settings: dict[str, Any], expected: Experiment) -> None:
    assert experiments_of(OFF, model(**settings)) == [expected]
    assert experiments_of(OFF, model()) == []


def test_the_duty_cycle_is_used_where_it_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert experiments_of(ServerConfig(desktop=True), model()) == [DUTY_CYCLE]
    for is_mac, expected in ((True, [DUTY_CYCLE]), (False, [])):
        monkeypatch.setattr(experimental, "CAN_SEE_DESKTOP", is_mac)
        assert experiments_of(ServerConfig(desktop="auto"), model()) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"speculators_model_type": "eagle3"}, [EAGLE]),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, [EAGLE]),
        ({"model_type": "qwen3", "dflash_config": {}}, [BLOCK]),
        ({"architectures": ["Qwen3DSparkModel"]}, [BLOCK]),
        ({"model_type": "gemma4_assistant"}, [ASSISTANT]),
        ({"model_type": "qwen3"}, []),
    ],
)
def test_a_drafter_is_known_by_its_configuration(
    config: dict[str, Any], expected: list[Experiment], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert experiments_of(OFF, model(draft=str(tmp_path))) == expected
    assert experiments_of(OFF, model(draft=str(tmp_path / "absent"))) == []


def test_workers_know_drafters_by_the_same_signs() -> None:
    assert SIGNS.keys() == _ATTACHED.keys()


def test_info_names_experimental_features() -> None:
    lines: list[str] = []
    info = ModelMetadata("m", "qwen3", 1, 1, 1, 1, 1, 1, True, "fits", experimental=(str(EXPERTS),))
    print_info("m", info, lines.append)
    assert any("experimental: experts on disk: never run on a Mac (docs/experts.md)" in line for line in lines)


@pytest.mark.anyio
async def test_a_load_logs_the_experimental_features(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    used = model(kv_events="tcp://127.0.0.1:5557")
    async with running(tmp_path, models=[used], server=OFF) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=chat())).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "experimental" in record.getMessage()]
    assert lines == [f"model m uses an experimental feature: {KV_EVENTS}"]
    assert "tells prompts" not in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("address", ["tcp://10.0.0.5:5557", "tcp://*:5557"])
async def test_a_load_warns_of_events_that_other_machines_can_read(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, models=[model(kv_events=address)], server=OFF) as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=chat())).status_code == 200
    assert f"kv_events tells prompts to all that connect to {address}" in caplog.text
