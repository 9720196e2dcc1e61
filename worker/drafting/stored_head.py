"""Heads for multi-token prediction in a checkpoint: which weights they are, and the head that they make."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from worker.drafting.head import Head
from worker.vision.graft import text_core

# A head that was taken out of a checkpoint, or trained for it, beside it.
SIDECAR: Final = "mtp.safetensors"
_QWEN: Final = "mtp."
# Names of the head's own parts in Qwen's form and in DeepSeek's.
_QWEN_PARTS: Final = {
    "fc": "fc", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "norm",
}  # fmt: skip
_NEXTN_PARTS: Final = {"eh_proj": "fc", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "norm"}
# Tables that some checkpoints have once more for their head.
_NEXTN_TABLES: Final = {"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"}
# Architectures with a head, besides those of which a sidecar can be: with Qwen's form, and with DeepSeek's.
QWEN: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
NEXTN: Final = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


class NoHead(Exception):
    """There is no head that can be used; the text is why, empty if the checkpoint has none."""


@dataclass(slots=True, frozen=True)
class Stored:
    """Weights of a head as stored, by their names below it, and whether norms are as in Qwen's published files."""

    weights: dict[str, mx.array]
    is_nextn: bool
    is_zero_centered: bool


def load_head(path: Path, config: Mapping[str, Any], model: Any, beside: Path | None = None) -> Head:
    """The head of the checkpoint that `model` was loaded from, or one in a folder of its own. Raises `NoHead`."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    kind, sizes = str(config.get("model_type", "")), dict(text or config)
    stored = _read(path, kind, sizes) if beside is None else _read_alone(beside, kind)
    if stored is None:
        raise NoHead("")
    if sizes.get("mtp_use_dedicated_embeddings"):
        raise NoHead("its head has tables of its own in a form that is not known")
    try:
        return _build(kind, dict(config), sizes, stored, model)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise NoHead(f"its head does not fit: {type(error).__name__}: {error}") from error


def _read(path: Path, kind: str, sizes: Mapping[str, Any]) -> Stored | None:
    """Weights of the head in the files of a checkpoint."""
    sidecar = path / SIDECAR
    is_beside = sidecar.exists()
    files = [sidecar] if is_beside else sorted(path.glob("model*.safetensors"))
    prefixes = {_QWEN: False, f"language_model.{_QWEN}": False, f"model.{_QWEN}": False}
    if kind in NEXTN:
        prefixes = {f"model.layers.{int(sizes['num_hidden_layers'])}.": True}
    elif kind not in QWEN and not is_beside:
        return None
    weights: dict[str, mx.array] = {}
    is_nextn = is_published = False
    for file in files:
        shapes, form = _header(file)
        is_published |= any("conv1d.weight" in name and shape[-1] != 1 for name, shape in shapes.items())
        is_published |= is_beside and form != "mlx"
        names = {name: prefix for name in shapes for prefix in prefixes if name.startswith(prefix)}
        if names:
            held: Any = mx.load(str(file))
            weights |= {name.removeprefix(prefix): held[name] for name, prefix in names.items()}
            is_nextn = any(prefixes[prefix] for prefix in names.values())
    # Qwen's published files store norms less 1 and convolutions in PyTorch's form; conversions to MLX change both.
    return Stored(weights, is_nextn, is_published and kind in QWEN) if weights else None


def _read_alone(folder: Path, kind: str) -> Stored | None:
    """A head of Qwen's form as mlx-vlm writes it: of nothing but its weights, below `mtp` if as published."""
    weights: dict[str, mx.array] = {}
    is_published = False
    for file in sorted(folder.glob("*.safetensors")):
        held: Any = mx.load(str(file))
        weights |= {name.removeprefix(_QWEN): weight for name, weight in held.items()}
        is_published |= any(name.startswith(_QWEN) for name in held) and _header(file)[1] != "mlx"
    return Stored(weights, False, is_published and kind in QWEN) if weights else None


def _header(file: Path) -> tuple[dict[str, list[int]], str]:
    """Names and shapes of the tensors of a file, and the framework whose form they have."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    form = (header.pop("__metadata__", None) or {}).get("format", "")
    return {name: entry["shape"] for name, entry in header.items()}, form


def _build(kind: str, config: dict[str, Any], sizes: dict[str, Any], stored: Stored, model: Any) -> Head:
    if any(name.endswith(".scales") for name in stored.weights):
        raise ValueError("its weights are quantized, which spoils a head")
    parts, extra = (_NEXTN_PARTS, _NEXTN_TABLES) if stored.is_nextn else (_QWEN_PARTS, dict[str, str]())
    own: dict[str, mx.array] = {}
    layer: dict[str, mx.array] = {}
    held: dict[str, mx.array] = {}
    for name, weight in stored.weights.items():
        part = name.removesuffix(".weight")
        # mlx-lm's class of Qwen3-Next adds what is missing to the norms of a layer by itself.
        is_done = kind == "qwen3_next" and name.startswith("layers.")
        if stored.is_zero_centered and weight.ndim == 1 and "norm" in name and not is_done:
            weight = weight + 1.0
        if name in extra:
            held[extra[name]] = weight
        elif part in parts:
            own[f"{parts[part]}.weight"] = weight
        elif "rotary_emb" not in name:
            layer[name if stored.is_nextn else name.removeprefix("layers.0.")] = weight
    if any(name.startswith("layers.") for name in layer):
        raise ValueError("it has more than one layer")
    one = _one_layer(kind, config, sizes, layer)
    head = Head(one, int(sizes["hidden_size"]), float(sizes.get("rms_norm_eps", 1e-6)))
    head.load_weights([*own.items(), *((f"layer.{name}", array) for name, array in _flat(one))])
    head.bind(*tables(model, held), text_core(model).norm)
    return head


def _one_layer(kind: str, config: dict[str, Any], sizes: dict[str, Any], weights: dict[str, mx.array]) -> Any:
    """A layer with attention of the target's class, with these weights.

    A model of one layer is made of its class, whose own `sanitize` knows how weights are stored.
    """
    overrides = {
        "num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0, "layer_types": None,
        "vocab_size": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    small = {key: value for key, value in overrides.items() if key in sizes or key != "layer_types"}
    changed = {**config, **({"text_config": {**sizes, **small}} if "text_config" in config else {}), **small}
    if changed.get("layer_types", 0) is None:
        changed.pop("layer_types")
    model_class, arguments = _get_classes(changed)
    target = model_class(arguments.from_dict(changed))
    core = text_core(target)
    prefix = next(
        name for name, _ in _flat(target) if ".layers.0." in f".{name}"
    ).partition("layers.0.")[0] + "layers.0."  # fmt: skip
    renamed = {prefix + name: weight for name, weight in weights.items()}
    sanitize = getattr(target, "sanitize", None)
    sanitized = sanitize(renamed) if sanitize is not None else renamed
    found = {name: weight for name, weight in sanitized.items() if name.startswith(prefix)}
    core.layers[0].load_weights([(name.removeprefix(prefix), weight) for name, weight in found.items()])
    return core.layers[0]


def tables(model: Any, held: Mapping[str, mx.array] = MappingProxyType({})) -> tuple[Any, Any]:
    """The table of embeddings and the function to logits of the target, or those that a head has for itself."""
    core, holder = text_core(model), model
    if getattr(holder, "lm_head", None) is None:
        holder = getattr(model, "language_model", model)
    embed = getattr(getattr(model, "graft", None), "embed", None) or core.embed_tokens
    lm_head = getattr(holder, "lm_head", None) or embed.as_linear
    if "embed" in held:
        embed = _table(nn.Embedding(1, 1), held["embed"])
    if "lm_head" in held:
        lm_head = _table(nn.Linear(1, 1, bias=False), held["lm_head"])
    return embed, lm_head


def _table(module: Any, weight: mx.array) -> Any:
    module.weight = weight
    return module


def _flat(module: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(module.parameters())
    return flat
