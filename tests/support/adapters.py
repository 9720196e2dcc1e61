"""Random adapters for tiny models, in the folders that mlx-lm and PEFT write; and a model with one as mlx-lm has it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
DENSE = (*ATTENTION, "self_attn.o_proj", "mlp.down_proj", "mlp.gate_proj")
_LEAVES = ("lora_a", "lora_b", "m")


def mlx_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 3.0,
    keys: Sequence[str] = DENSE,
    layers: int = 4,
    dora: bool = False,
    **config: Any,
) -> Path:
    """An adapter as `mlx_lm.lora` saves it."""
    trained, _ = load_model(model)
    mx.random.seed(seed)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)}
    linear_to_lora_layers(trained, layers, parameters, use_dora=dora)
    weights = {
        name: array * mx.random.uniform(0.5, 1.5, array.shape) if name.endswith(".m") else _random(array)
        for name, array in tree_flatten(trained.parameters())
        if name.rpartition(".")[2] in _LEAVES
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    kind = "dora" if dora else "lora"
    written = {"model": str(model), "fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def peft_adapter(folder: Path, of: Path, alpha: float, **config: Any) -> Path:
    """The adapter of a folder of mlx-lm's, in the form of PEFT's: its scale is `alpha` ÷ rank."""
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector.weight"}
    weights: dict[str, mx.array] = {}
    loaded: Any = mx.load(str(of / "adapters.safetensors"))
    for name, array in loaded.items():
        module, _, leaf = name.rpartition(".")
        weights[f"base_model.model.{module}.{names[leaf]}"] = mx.contiguous(array.T)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), weights)
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "base_model_name_or_path": "tiny", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def reference(model: Path, adapter: Path | None) -> Any:
    """The model with an adapter, by mlx-lm's own code."""
    base, _ = load_model(model)
    return base if adapter is None else load_adapters(base, str(adapter))


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """The likeliest tokens after a prompt, one sequence alone on mlx-lm's caches."""
    cache = make_prompt_cache(model)
    said: list[int] = []
    inputs = mx.array([list(prompt)])
    for _ in range(tokens):
        token = int(mx.argmax(model(inputs, cache=cache)[0, -1]).item())
        said.append(token)
        inputs = mx.array([[token]])
    return said


def _random(array: mx.array) -> mx.array:
    return mx.random.normal(array.shape) * 0.2
