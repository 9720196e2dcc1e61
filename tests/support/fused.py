"""Adapters made without loading a model, and models that have one in their weights, to compare served ones with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

RANK, SCALE = 4, 3.0


def random_adapter(folder: Path, model: Path, seed: int, modules: Sequence[str]) -> Path:
    """A LoRA adapter as `mlx_lm.lora` saves it, for these modules of each layer of a model in one float32 file."""
    weights: dict[str, mx.array] = {}
    mx.random.seed(seed)
    for name, array in sorted(_weights(model).items()):
        at = name.find("layers.")
        module = name[at:].removesuffix(".weight")
        if at >= 0 and name.endswith(".weight") and module.endswith(tuple(f".{each}" for each in modules)):
            if "vision" in name or "visual" in name:
                continue
            outputs, inputs = array.shape
            weights[f"model.{module}.lora_a"] = mx.random.normal((inputs, RANK)) * 0.2
            weights[f"model.{module}.lora_b"] = mx.random.normal((RANK, outputs)) * 0.2
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": list(modules)}
    config = {"model": str(model), "fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def fused(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the updates of such an adapter added to its weights."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if not file.name.startswith("model"):
            (folder / file.name).write_bytes(file.read_bytes())
    weights, updates = _weights(model), _load(adapter / "adapters.safetensors")
    for name, lora_a in updates.items():
        module, _, leaf = name.partition(".lora_")
        if leaf == "a":
            tail = f"{module.removeprefix('model.')}.weight"
            own = next(each for each in weights if each.endswith(tail) and "vis" not in each)
            weights[own] = weights[own] + SCALE * (lora_a @ updates[f"{module}.lora_b"]).T
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _weights(model: Path) -> dict[str, mx.array]:
    return _load(model / "model.safetensors")


def _load(file: Path) -> dict[str, mx.array]:
    arrays: Any = mx.load(str(file))
    return dict(arrays)
