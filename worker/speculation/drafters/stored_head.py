"""Loader of heads for multi-token prediction: finds and reads the weights in a checkpoint, and builds the head."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.checkpoint import is_head, unused
from protocol.weight_files import weight_files
from worker.model.checkpoint_view import files_of
from worker.speculation.drafters.head import PredictionHead
from worker.speculation.drafters.head_forms import FORMS, QWEN, HeadForm
from worker.speculation.drafters.target import core_of, tables

# File of a head that was extracted from a checkpoint, or trained for it.
SIDECAR: Final = "mtp.safetensors"
_QWEN_PREFIX: Final = "mtp."
# Maximum length of an error's text in a reason; some errors list hundreds of names.
_MAX_REASON_CHARS: Final = 200
# Format of a head in a folder of its own, by the folder's `model_type`, with pairs of a tensor prefix and its
# replacement.
ALONE: Final[Mapping[str, tuple[HeadForm, Sequence[tuple[str, str]]]]] = {
    "qwen3_5_mtp": (QWEN, ((_QWEN_PREFIX, ""),)),
    "glm4_moe_lite_mtp": (
        FORMS["glm4_moe_lite"],
        (
            ("model.mtp_block.", ""),
            ("model.shared_head_norm.", "shared_head.norm."),
            ("lm_head.", "shared_head.head."),
            ("model.", ""),
        ),
    ),
    "glm_moe_dsa_mtp": (FORMS["glm_moe_dsa"], (("mtp.shared_head_norm.", "shared_head.norm."), ("mtp.", ""))),
}


class NoHead(Exception):
    """Raised if no head can be used; the text is the reason, empty if the checkpoint has none."""


@dataclass(slots=True, frozen=True)
class StoredHead:
    """Weights of a head as stored, by their names without the prefix. The weights of norms may be stored minus 1."""

    weights: dict[str, mx.array]
    form: HeadForm
    is_zero_centered: bool


@dataclass(slots=True, frozen=True)
class TensorFile:
    """Tensors of one file, which are loaded lazily, and the framework whose layout they have."""

    tensors: dict[str, mx.array]
    framework: str


def load_head(path: Path, config: Mapping[str, Any], model: Any, beside: Path | None = None) -> PredictionHead:
    """Load the head in the folder `beside`, or in the model's checkpoint `path`. Raises `NoHead`."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
    kind, sizes = str(config.get("model_type", "")), dict(text or config)
    stored = _read(path, kind, sizes) if beside is None else _read_alone(beside, kind)
    if stored is None:
        raise NoHead("")
    if sizes.get("mtp_use_dedicated_embeddings"):
        raise NoHead("its head has tables of its own in a form that is not known")
    try:
        return _build(kind, dict(config), sizes, stored, model)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise NoHead(f"its head does not fit: {type(error).__name__}: {reason}") from error


def _read(path: Path, kind: str, sizes: Mapping[str, Any]) -> StoredHead | None:
    """Return the head in the files of a checkpoint. Raises `NoHead` for an unsupported format."""
    sidecar = path / SIDECAR
    is_beside = sidecar.exists()
    files = [_open(file) for file in ([sidecar] if is_beside else weight_files(path))]
    form = FORMS.get(kind)
    if form is None and not is_beside:
        if any(is_head(name) for file in files for name in file.tensors):
            raise NoHead(unused(kind))
        return None
    for each in [*([form] if form is not None else []), *([QWEN] if is_beside else [])]:
        weights, frameworks = _weights(each, files, sizes)
        if weights:
            is_own = form is each and each.is_zero_centered
            return StoredHead(weights, each, is_own and _is_published(each, files, frameworks, is_beside))
    return None


def _weights(
    form: HeadForm, files: Sequence[TensorFile], sizes: Mapping[str, Any]
) -> tuple[dict[str, mx.array], set[str]]:
    """Return the weights of one format, by their names without the prefix, and the frameworks that the files name."""
    prefixes = [prefix.format(layers=sizes.get("num_hidden_layers")) for prefix in form.prefixes]
    weights: dict[str, mx.array] = {}
    frameworks: set[str] = set()
    for file in files:
        # The first prefix that matches applies, because one prefix may begin with another.
        names = {name: prefix for name in file.tensors for prefix in reversed(prefixes) if name.startswith(prefix)}
        weights |= {name.removeprefix(prefix): file.tensors[name] for name, prefix in names.items()}
        frameworks |= {file.framework} if names else set()
    return weights, frameworks


def _is_published(form: HeadForm, files: Sequence[TensorFile], frameworks: set[str], is_beside: bool) -> bool:
    """Return whether weights are as published: conversions to MLX change norms and convolutions.

    Qwen's models are recognized by the convolutions in all files, because some conversions are marked as published.
    """
    if is_beside or form is not QWEN:
        return frameworks != {"mlx"}
    tensors = [item for file in files for item in file.tensors.items()]
    return any("conv1d.weight" in name and tensor.shape[-1] != 1 for name, tensor in tensors)


def _read_alone(folder: Path, kind: str) -> StoredHead | None:
    """Return the head in a folder of its own, in mlx-vlm's format, or in Qwen's published format below `mtp`."""
    form, renames = ALONE[str(json.loads((folder / "config.json").read_text()).get("model_type", ""))]
    weights: dict[str, mx.array] = {}
    is_published = False
    for file in map(_open, files_of(folder)):
        weights |= {_renamed(name, renames): weight for name, weight in file.tensors.items()}
        is_published |= any(name.startswith(_QWEN_PREFIX) for name in file.tensors) and file.framework != "mlx"
    is_zero_centered = form is QWEN and FORMS.get(kind) is QWEN
    return StoredHead(weights, form, is_published and is_zero_centered) if weights else None


def _open(file: Path) -> TensorFile:
    tensors: Any
    metadata: Any
    tensors, metadata = mx.load(str(file), return_metadata=True)  # this reads the header only
    return TensorFile(tensors, metadata.get("format", ""))


def _build(kind: str, config: dict[str, Any], sizes: dict[str, Any], stored: StoredHead, model: Any) -> PredictionHead:
    form, own, layer_weights = stored.form, dict[str, mx.array](), dict[str, mx.array]()
    own_tables: dict[str, mx.array] = {}
    if any(name.endswith(".scales") for name in stored.weights):
        raise ValueError("its weights are quantized, which spoils a head")
    for name, weight in stored.weights.items():
        part, _, leaf = name.rpartition(".")
        # Zero-centered norms are stored without the 1 that is added here. mlx-lm's `sanitize` adds it to the layers of
        # Qwen3-Next.
        is_done = kind == "qwen3_next" and name.startswith("layers.")
        if stored.is_zero_centered and weight.ndim == 1 and "norm" in name and not is_done:
            weight = weight + 1.0
        if name in form.tables:
            own_tables[form.tables[name]] = weight
        elif part in form.parts:
            own[f"{form.parts[part]}.{leaf}"] = weight
        elif name.startswith("layers.") and not form.layer:
            continue  # only the first layer of such a head is used
        elif name.startswith(form.layer) and "rotary_emb" not in name:
            layer_weights[_renamed(name.removeprefix(form.layer), form.renames)] = weight
        elif form is QWEN and name.startswith("layers."):
            raise ValueError("it has more than one layer")
    layer, caches = _layer(kind, config, sizes, layer_weights, form)
    eps = float(sizes.get("rms_norm_eps") or sizes.get("layernorm_epsilon") or 1e-6)
    head = PredictionHead(
        layer, int(sizes["hidden_size"]), eps, form, has_norm="norm.weight" in own, has_bias="fc.bias" in own
    )
    head.window, head.caches = _window(layer, sizes), caches
    head.load_weights([*own.items(), *((f"layer.{name}", array) for name, array in _flat(layer))])
    if unread := [name for name, array in _flat(head) if not mx.issubdtype(array.dtype, mx.floating)]:
        raise ValueError(f"its weights are in a form that is not read, such as {unread[0]}")
    head.bind(*tables(model, own_tables), core_of(model).norm)
    return head


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for begin, other in renames:
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def _window(layer: Any, sizes: Mapping[str, Any]) -> int | None:
    """Return the size of the sliding window of a layer's attention; None if the layer attends to all tokens."""
    is_sliding = getattr(layer, "is_sliding", False) or getattr(layer, "is_sliding_window", False)
    return int(sizes.get("sliding_window") or sizes["sliding_window_size"]) if is_sliding else None


def _layer(
    kind: str, config: dict[str, Any], sizes: dict[str, Any], weights: dict[str, mx.array], form: HeadForm
) -> tuple[Any, int]:
    """Return a layer of the target's class with these weights, and the number of its caches.

    A model of one layer is built, because its `sanitize` converts weights from their stored format.
    """
    overrides = {
        "num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0, "layer_types": None,
        "vocab_size": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    small = {key: value for key, value in overrides.items() if key in sizes or key != "layer_types"}
    small |= form.changes(sizes)
    changed = {**config, **({"text_config": {**sizes, **small}} if "text_config" in config else {}), **small}
    if changed.get("layer_types", 0) is None:
        changed.pop("layer_types")
    model_class, arguments = _get_classes(changed)
    target = model_class(arguments.from_dict(changed))
    core = core_of(target)
    some = next(name for name, _ in _flat(target) if ".layers.0." in f".{name}")
    prefix = some.partition("layers.0.")[0] + "layers.0."
    renamed = {prefix + name: weight for name, weight in weights.items()}
    sanitize = getattr(target, "sanitize", None)
    sanitized = sanitize(renamed) if sanitize is not None else renamed
    own = {name.removeprefix(prefix): weight for name, weight in sanitized.items() if name.startswith(prefix)}
    layer = core.layers[0] if form.compose is None else form.compose(core.layers[0])
    layer.load_weights([(_renamed(name, form.own), weight) for name, weight in own.items()])
    cache = make_prompt_cache(target)[0]
    return layer, len(cache.caches) if isinstance(cache, CacheList) and form.compose is None else 1


def _flat(module: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(module.parameters())
    return flat
