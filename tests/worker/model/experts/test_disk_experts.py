"""Experts on disk: the same tokens as with all of them in memory, whatever the cache holds, and clear refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_config, save_model

from protocol.failures import Code
from protocol.model_files import EXPERTS_INDEX, FOLDER, read_index
from protocol.stats import Stats
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import build
from tests.support.scale import patient, scaled
from worker.errors import LoadFailed
from worker.start.checked_model import load_checked
from worker.tools.repack import repack

FAMILIES = scaled(["qwen3_moe", "qwen3_moe, quantized", "llama4", "gpt_oss"], ["qwen3_moe, quantized"])
EXPERTS = {"qwen3_moe": {"num_experts": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def model_of(folder: Path, family: str) -> Path:
    """A model with experts, and beside it the same one repacked."""
    path = folder / family.replace(", ", "-")
    if not path.exists():
        architecture, _, form = family.partition(", ")
        build(architecture, path, **EXPERTS.get(architecture, {}))
        if form:
            _quantize(path)
        repack(path, disk_of(path), trust_remote_code=False, progress=lambda _text: None)
    return path


def disk_of(path: Path) -> Path:
    return path.with_name(path.name + "-disk")


def _quantize(path: Path) -> None:
    model, config = load_model(path)
    nn.quantize(model, 32, 8, class_predicate=lambda at, module: hasattr(module, "to_quantized") and at[-4:] != "gate")
    save_model(path, model)
    save_config(config | {"quantization": {"group_size": 32, "bits": 8}}, config_path=path / "config.json")


def answers(
    path: Path, prompts: Sequence[Sequence[int]], at_once: bool, **settings: object
) -> tuple[list[Result], Stats | None]:
    requests = [
        Generate(rid, TokensPrompt(tuple(prompt)), Sampling(temperature=0.8, seed=rid, ignore_eos=True), 12)
        for rid, prompt in enumerate(prompts, 1)
    ]
    with EngineHarness(spec(path, speculate="off", **settings)) as engine:
        runs = [requests] if at_once else [[request] for request in requests]
        return [result for run in runs for result in engine.run(run)], engine.loaded.experts


PROMPTS = ([1, 5, 9, 77, 30], [3, 4, 8, 120, 7, 55, 66, 9, 10], list(range(40, 140)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wanted", scaled([1, -1, 1 << 30], [1]))
def test_tokens_are_those_of_the_whole_model_for_any_size_of_the_cache(folder: Path, family: str, wanted: int) -> None:
    path = model_of(folder, family)
    whole, _ = answers(path, PROMPTS, at_once=False)
    for at_once in (False, True):
        results, counts = answers(disk_of(path), PROMPTS, at_once, experts="disk", expert_cache_bytes=wanted)
        assert [result.ids for result in results] == [result.ids for result in whole]
        assert counts is not None
        index = read_index(disk_of(path))
        assert counts.expert_cache_bytes == index.cache_bytes(wanted)
        assert counts.expert_misses > 0
        assert counts.expert_hits > 0
        assert counts.expert_read_bytes == counts.expert_misses * index.layers[0].record_bytes
        assert bool(counts.expert_evictions) == (wanted < 1 << 30)


def test_a_cache_that_holds_all_experts_reads_each_once(folder: Path) -> None:
    path = disk_of(model_of(folder, "qwen3_moe"))
    _, counts = answers(path, PROMPTS, True, experts="disk", expert_cache_bytes=1 << 30)
    assert counts is not None
    assert counts.expert_misses <= sum(layer.experts for layer in read_index(path).layers)
    assert counts.expert_cache_bytes == read_index(path).total_bytes


def test_weights_count_what_is_in_memory(folder: Path) -> None:
    path = model_of(folder, "qwen3_moe")
    whole = load_checked(spec(path), lambda *_: None)
    disk = load_checked(spec(disk_of(path), experts="disk", expert_cache_bytes=1), lambda *_: None)
    index = read_index(disk_of(path))
    parameters = sum(array.nbytes for _, array in tree_flatten(whole.model.parameters()))
    saved = index.total_bytes - index.cache_bytes(1)
    assert saved > 0
    assert parameters - saved == disk.weights_bytes


@pytest.mark.parametrize(
    ("settings", "is_repacked", "code", "says"),
    [
        ({"experts": "disk"}, False, Code.BAD_CONFIG, "mlxctl repack"),
        ({}, True, Code.BAD_CONFIG, 'experts = "disk"'),
    ],
)
def test_a_folder_of_the_other_kind_is_refused(
    folder: Path, settings: dict[str, str], is_repacked: bool, code: Code, says: str
) -> None:
    path = model_of(folder, "qwen3_moe")
    with pytest.raises(LoadFailed, match=says) as failure:
        load_checked(spec(disk_of(path) if is_repacked else path, **settings), lambda *_: None)
    assert failure.value.failure.code is code


def _cut(path: Path) -> None:
    file = path / FOLDER / "layer-0000.bin"
    file.write_bytes(file.read_bytes()[:-1])


def _other_version(path: Path) -> None:
    file = path / FOLDER / EXPERTS_INDEX
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))


def _outside(path: Path) -> None:
    file = path / FOLDER / EXPERTS_INDEX
    index = json.loads(file.read_text())
    index["layers"][0]["file"] = "../config.json"
    file.write_text(json.dumps(index))


def _fewer_layers(path: Path) -> None:
    file = path / FOLDER / EXPERTS_INDEX
    index = json.loads(file.read_text())
    del index["layers"][0]
    file.write_text(json.dumps(index))


def _other_shape(path: Path) -> None:
    file = path / FOLDER / EXPERTS_INDEX
    index = json.loads(file.read_text())
    index["layers"][0]["tensors"][0]["shape"][0] += 1
    file.write_text(json.dumps(index))


def _fewer_experts(path: Path) -> None:
    file, records = path / FOLDER / EXPERTS_INDEX, path / FOLDER / "layer-0000.bin"
    index = json.loads(file.read_text())
    index["layers"][0]["experts"] -= 1
    records.write_bytes(records.read_bytes()[: -index["layers"][0]["record_bytes"]])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("damage", [_cut, _other_version, _outside, _fewer_layers, _other_shape, _fewer_experts])
def test_a_damaged_folder_fails_to_load_with_a_sentence(folder: Path, tmp_path: Path, damage: object) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(disk_of(model_of(folder, "qwen3_moe")), path)
    damage(path)  # type: ignore[operator]
    with pytest.raises(LoadFailed) as failure:
        load_checked(spec(path, experts="disk"), lambda *_: None)
    assert failure.value.failure.code is Code.MODEL_CORRUPT


def test_only_a_model_with_experts_is_repacked_and_only_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no experts"):
        repack(build("qwen3", tmp_path / "dense"), tmp_path / "out", False, lambda _text: None)
    path = model_of(folder, "qwen3_moe")
    with pytest.raises(ValueError, match="is there already"):
        repack(path, disk_of(path), False, lambda _text: None)
    with pytest.raises(ValueError, match="repacked already"):
        repack(disk_of(path), tmp_path / "twice", False, lambda _text: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_repack_that_is_cut_off_leaves_nothing_and_touches_nothing(
    folder: Path, tmp_path: Path, end: BaseException
) -> None:
    other = tmp_path / "out.partial"
    other.mkdir()
    (other / "mine").write_text("of somebody else")

    def progress(text: str) -> None:
        if text == "all else":
            raise end

    with pytest.raises(type(end)):
        repack(model_of(folder, "qwen3_moe"), tmp_path / "out", False, progress)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert (other / "mine").exists()


@pytest.mark.soak
def test_what_a_killed_repack_leaves_is_deleted_by_the_next_one(folder: Path, tmp_path: Path) -> None:
    source, target = model_of(folder, "qwen3_moe"), tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path; from worker.tools.repack import repack; "
        "repack(Path(sys.argv[1]), Path(sys.argv[2]), False, "
        "lambda text: os.kill(os.getpid(), signal.SIGKILL) if text == 'all else' else None)"
    )
    argv = [sys.executable, "-P", "-c", code, str(source), str(target)]
    assert subprocess.run(argv, check=False, timeout=patient(60)).returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert any(left.rglob("layer-*.bin"))
    # Folders of one that runs, of another target, and of nobody that we know.
    others = [f"out.partial-{os.getppid()}", "out2.partial-1", "out.partial-x", "out.partial", f"out.partial-{10**20}"]
    for name in others:
        (tmp_path / name).mkdir()

    repack(source, target, False, lambda _text: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *others])


@pytest.mark.soak
def test_a_repack_that_the_disk_does_not_take_says_so_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    code = limit + "from worker.tools.repack import main; main()"
    argv = [sys.executable, "-P", "-c", code, str(model_of(folder, "qwen3_moe")), str(tmp_path / "out")]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1
    assert "cannot be repacked" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_nowhere_is_a_target_that_exists(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is there already"):
        repack(model_of(folder, "qwen3_moe"), tmp_path / "out", False, lambda _text: None)


def test_the_code_of_a_model_is_repacked_with_it(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_of(folder, "qwen3_moe"), source)
    (source / "modeling_own.py").write_text("# its own")
    repack(source, tmp_path / "out", False, lambda _text: None)
    assert (tmp_path / "out" / "modeling_own.py").read_text() == "# its own"
    assert load_checked(spec(tmp_path / "out", experts="disk"), lambda *_: None).experts is not None
