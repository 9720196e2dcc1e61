"""Folders that are no adapter of the model: each is refused with its reason, and nothing of it reaches MLX."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from tests.support.adapters import mlx_adapter, peft_adapter
from tests.support.models import build
from worker.model.linears import Linears
from worker.model.lora import adapter_files
from worker.model.lora.adapter_files import Files, UnusableAdapter, read


@pytest.fixture(scope="module")
def linears(model_folder: Callable[[str], Path]) -> Linears:
    return Linears(load_model(model_folder("qwen3"))[0])


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen3")


def refusal(folder: Path, linears: Linears) -> str:
    with pytest.raises(UnusableAdapter) as refused:
        read(folder, linears)
    return str(refused.value)


def rewrite(folder: Path, **changes: Any) -> Path:
    """The folder with keys of its configuration changed."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Path:
    """The folder with other tensors in its file."""
    file = next(folder.glob("*.safetensors"))
    weights: Any = mx.load(str(file))
    mx.eval(weights)
    mx.save_safetensors(str(file), change(dict(weights)))
    return folder


def test_both_forms_of_one_adapter_are_read_as_the_same_updates(tmp_path: Path, model: Path, linears: Linears) -> None:
    ours = read(mlx_adapter(tmp_path / "mlx", model, rank=4, scale=2.5), linears)
    theirs = read(peft_adapter(tmp_path / "peft", tmp_path / "mlx", alpha=10.0), linears)

    def facts(files: Files) -> set[tuple[str, int, float]]:
        return {(each.place.path, each.rank, each.scale) for each in files.updates}

    assert facts(ours) == facts(theirs)
    assert ours.rank == theirs.rank == 4
    assert (ours.base, theirs.base) == (str(model), "tiny")
    assert ours.digest != theirs.digest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fine_tune_type": "full"}, "full fine-tune"),
        ({"fine_tune_type": "new"}, "'new'"),
        ({"lora_parameters": None}, "no lora_parameters"),
        ({"lora_parameters": {"rank": 4}}, "scale as None"),
        ({"lora_parameters": {"scale": float("inf")}}, "scale as inf"),
        ({"peft_type": "IA3"}, "'IA3'"),
    ],
)
def test_a_configuration_of_something_else_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, model: Path, linears: Linears
) -> None:
    folder = rewrite(mlx_adapter(tmp_path / "a", model, keys=["self_attn.q_proj"], layers=1), **changes)
    assert reason in refusal(folder, linears)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"bias": "all"}, "biases"),
        ({"lora_alpha": None}, "lora_alpha as None"),
        ({"alpha_pattern": {"(a+)+": 2}}, "regular expressions"),
    ],
)
def test_what_peft_can_train_beyond_low_rank_updates_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path, model: Path, linears: Linears
) -> None:
    mlx_adapter(tmp_path / "mlx", model, keys=["self_attn.q_proj"], layers=1)
    folder = rewrite(peft_adapter(tmp_path / "a", tmp_path / "mlx", alpha=8.0), **changes)
    assert reason in refusal(folder, linears)


def test_scales_of_peft_follow_its_patterns_and_its_rank(tmp_path: Path, model: Path, linears: Linears) -> None:
    mlx_adapter(tmp_path / "mlx", model, rank=4, keys=["self_attn.q_proj", "mlp.down_proj"], layers=1)
    folder = peft_adapter(tmp_path / "a", tmp_path / "mlx", 8.0, use_rslora=True, alpha_pattern={"down_proj": 32})
    scales = {each.place.path.rpartition(".")[2]: each.scale for each in read(folder, linears).updates}
    assert scales == {"q_proj": 4.0, "down_proj": 16.0}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.mlp.experts.0.up_proj.lora_a", "experts"),
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", "experts"),
        ("model.embed_tokens.lora_a", "table of embeddings"),
        ("model.layers.99.self_attn.q_proj.lora_a", "another base"),
        ("model.layers.0.self_attn.q_proj.weight", "no part of a low-rank update"),
        ("model.lora_embedding_A", "table of embeddings"),
    ],
)
def test_tensors_for_other_modules_are_refused(
    name: str, reason: str, tmp_path: Path, model: Path, linears: Linears
) -> None:
    folder = mlx_adapter(tmp_path / "a", model, keys=["self_attn.q_proj"], layers=1)
    assert reason in refusal(with_tensors(folder, lambda weights: weights | {name: mx.zeros((64, 4))}), linears)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, model: Path, linears: Linears) -> None:
    other = build("qwen3", tmp_path / "other", hidden_size=32)
    assert "another base" in refusal(mlx_adapter(tmp_path / "a", other), linears)
    whole = mlx_adapter(tmp_path / "b", model, keys=["self_attn.q_proj"], layers=1)

    def change(leaf: str, shape: tuple[int, ...]) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
        return lambda weights: {
            name: mx.zeros(shape) if name.endswith(leaf) else array for name, array in weights.items()
        }

    for leaf, shape in (("lora_a", (64, 5)), ("lora_a", (64,)), ("lora_b", (4, 65)), ("lora_a", (64, 0))):
        assert refusal(with_tensors(whole, change(leaf, shape)), linears)
    without_b = with_tensors(whole, lambda weights: {name: a for name, a in weights.items() if "lora_b" not in name})
    assert "lacks one" in refusal(without_b, linears)


def test_files_that_lie_about_themselves_are_refused(
    tmp_path: Path, model: Path, linears: Linears, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mlx_adapter(tmp_path / "a", model, keys=["self_attn.q_proj"], layers=1)
    file = folder / "adapters.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")

    def with_header(**entry: Any) -> bytes:
        text = json.dumps(header | {name: header[name] | entry}).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    for lie in (
        data[:5],
        data[: len(data) // 2],
        struct.pack("<Q", 1 << 62) + data[8:],
        data[:8] + b"{" * length + data[8 + length :],
        with_header(data_offsets=[0, 1 << 40]),
        with_header(data_offsets=[-4, 4 * 256 - 4]),
        with_header(shape=[1 << 32, 1 << 32]),
        with_header(shape="64"),
        with_header(dtype="I64"),
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        file.write_bytes(lie)
        assert refusal(folder, linears)
    file.write_bytes(data)
    assert read(folder, linears)
    monkeypatch.setattr(adapter_files, "FILE_BYTES_MAX", len(data) - 1)
    assert "at most" in refusal(folder, linears)


def test_folders_without_an_adapter_are_refused(tmp_path: Path, model: Path, linears: Linears) -> None:
    assert "no folder" in refusal(tmp_path / "absent", linears)
    assert "no folder of an adapter" in refusal(tmp_path, linears)
    folder = mlx_adapter(tmp_path / "a", model, keys=["self_attn.q_proj"], layers=1)
    (folder / "adapters.safetensors").unlink()
    assert "holds no adapters.safetensors" in refusal(folder, linears)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert "pickle" in refusal(folder, linears)
    (folder / "adapters.safetensors").mkdir()
    assert refusal(folder, linears)
    for text in (b"[", b"[1]", b"[" * 100_000, b"\xff\xfe"):
        (folder / "adapter_config.json").write_bytes(text)
        assert refusal(folder, linears)
