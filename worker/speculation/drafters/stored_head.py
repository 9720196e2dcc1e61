"""Heads for multi-token prediction in a checkpoint: which weights they are, and the head that they make."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.prediction_heads import is_head, unused
from worker.speculation.drafters.cores import core_of, embeddings_of
from worker.speculation.drafters.head import PredictionHead
from worker.speculation.drafters.head_forms import FORMS, QWEN, HeadForm

# A head that was taken out of a checkpoint, or trained for it, beside it.
SIDECAR: Final = "mtp.safetensors"
_QWEN: Final = "mtp."
# Of an error that may list hundreds of names.
_REASON_CHARS: Final = 200
# Folders of a head alone by their `model_type`, with the beginnings of names there that are others in its form.
ALONE: Final[Mapping[str, tuple[HeadForm, Sequence[tuple[str, str]]]]] = {
    "qwen3_5_mtp": (QWEN, ((_QWEN, ""),)),
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
    """There is no head that can be used; the text is why, empty if the checkpoint has none."""


@dataclass(slots=True, frozen=True)
class StoredHead:
    """Weights of a head as stored, by their names below it, and whether norms are stored less 1."""

    weights: dict[str, mx.array]
    form: HeadForm
    is_zero_centered: bool


def load_head(path: Path, config: Mapping[str, Any], model: Any, beside: Path | None = None) -> PredictionHead:
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
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:_REASON_CHARS]
        raise NoHead(f"its head does not fit: {type(error).__name__}: {reason}") from error


def _read(path: Path, kind: str, sizes: Mapping[str, Any]) -> StoredHead | None:
    """Weights of the head in the files of a checkpoint. Raises `NoHead` for those of a form that is not run."""
    sidecar = path / SIDECAR
    is_beside = sidecar.exists()
    headers = {file: _header(file) for file in ([sidecar] if is_beside else sorted(path.glob("model*.safetensors")))}
    form = FORMS.get(kind)
    if form is None and not is_beside:
        if any(is_head(name) for shapes, _ in headers.values() for name in shapes):
            raise NoHead(unused(kind))
        return None
    for each in [*([form] if form is not None else []), *([QWEN] if is_beside else [])]:
        weights, forms = _take(each, headers, sizes)
        if weights:
            is_own = form is each and each.is_zero_centered
            return StoredHead(weights, each, is_own and _is_published(each, headers, forms, is_beside))
    return None


def _take(
    form: HeadForm, headers: Mapping[Path, tuple[dict[str, list[int]], str]], sizes: Mapping[str, Any]
) -> tuple[dict[str, mx.array], set[str]]:
    """Weights of a form, by their names below its prefix, and the frameworks of their files."""
    prefixes = [prefix.format(layers=sizes.get("num_hidden_layers")) for prefix in form.prefixes]
    weights: dict[str, mx.array] = {}
    frameworks: set[str] = set()
    for file, (shapes, framework) in headers.items():
        # The first prefix counts: one may be the beginning of another.
        names = {name: prefix for name in shapes for prefix in reversed(prefixes) if name.startswith(prefix)}
        if names:
            held: Any = mx.load(str(file))
            weights |= {name.removeprefix(prefix): held[name] for name, prefix in names.items()}
            frameworks.add(framework)
    return weights, frameworks


def _is_published(
    form: HeadForm, headers: Mapping[Path, tuple[dict[str, list[int]], str]], frameworks: set[str], is_beside: bool
) -> bool:
    """Whether weights are as published: conversions to MLX change norms and convolutions.

    Qwen's models are known by the convolutions of all files, which some conversions mark as published.
    """
    if is_beside or form is not QWEN:
        return frameworks != {"mlx"}
    shapes = [item for held, _ in headers.values() for item in held.items()]
    return any("conv1d.weight" in name and shape[-1] != 1 for name, shape in shapes)


def _read_alone(folder: Path, kind: str) -> StoredHead | None:
    """A head as mlx-vlm writes it: of nothing but its weights, in Qwen's form below `mtp` if as published."""
    form, renames = ALONE[str(json.loads((folder / "config.json").read_text()).get("model_type", ""))]
    weights: dict[str, mx.array] = {}
    is_published = False
    for file in sorted(folder.glob("*.safetensors")):
        held: Any = mx.load(str(file))
        weights |= {_renamed(name, renames): weight for name, weight in held.items()}
        is_published |= any(name.startswith(_QWEN) for name in held) and _header(file)[1] != "mlx"
    is_zero_centered = form is QWEN and FORMS.get(kind) is QWEN
    return StoredHead(weights, form, is_published and is_zero_centered) if weights else None


def _header(file: Path) -> tuple[dict[str, list[int]], str]:
    """Names and shapes of the tensors of a file, and the framework whose form they have."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    form = (header.pop("__metadata__", None) or {}).get("format", "")
    return {name: entry["shape"] for name, entry in header.items()}, form


def _build(kind: str, config: dict[str, Any], sizes: dict[str, Any], stored: StoredHead, model: Any) -> PredictionHead:
    form, own, layer, held = stored.form, dict[str, mx.array](), dict[str, mx.array](), dict[str, mx.array]()
    if any(name.endswith(".scales") for name in stored.weights):
        raise ValueError("its weights are quantized, which spoils a head")
    for name, weight in stored.weights.items():
        part, _, leaf = name.rpartition(".")
        # mlx-lm's class of Qwen3-Next adds what is missing to the norms of a layer by itself.
        is_done = kind == "qwen3_next" and name.startswith("layers.")
        if stored.is_zero_centered and weight.ndim == 1 and "norm" in name and not is_done:
            weight = weight + 1.0
        if name in form.tables:
            held[form.tables[name]] = weight
        elif part in form.parts:
            own[f"{form.parts[part]}.{leaf}"] = weight
        elif name.startswith("layers.") and not form.layer:
            continue  # another than the first
        elif name.startswith(form.layer) and "rotary_emb" not in name:
            layer[_renamed(name.removeprefix(form.layer), form.renames)] = weight
        elif form is QWEN and name.startswith("layers."):
            raise ValueError("it has more than one layer")
    one, caches = _one_layer(kind, config, sizes, layer, form)
    eps = float(sizes.get("rms_norm_eps") or sizes.get("layernorm_epsilon") or 1e-6)
    head = PredictionHead(
        one, int(sizes["hidden_size"]), eps, form, has_norm="norm.weight" in own, has_bias="fc.bias" in own
    )
    head.window, head.caches = _window(one, sizes), caches
    head.load_weights([*own.items(), *((f"layer.{name}", array) for name, array in _flat(one))])
    if unread := [name for name, array in _flat(head) if not mx.issubdtype(array.dtype, mx.floating)]:
        raise ValueError(f"its weights are in a form that is not read, such as {unread[0]}")
    head.bind(*tables(model, held), core_of(model).norm)
    return head


def _renamed(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for begin, other in renames:
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def _window(layer: Any, sizes: Mapping[str, Any]) -> int | None:
    """The tokens that a layer sees; None for all."""
    is_sliding = getattr(layer, "is_sliding", False) or getattr(layer, "is_sliding_window", False)
    return int(sizes.get("sliding_window") or sizes["sliding_window_size"]) if is_sliding else None


def _one_layer(
    kind: str, config: dict[str, Any], sizes: dict[str, Any], weights: dict[str, mx.array], form: HeadForm
) -> tuple[Any, int]:
    """A layer with attention of the target's class, with these weights, and how many caches it has.

    A model of one layer is made of its class, whose own `sanitize` knows how weights are stored.
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
    prefix = next(
        name for name, _ in _flat(target) if ".layers.0." in f".{name}"
    ).partition("layers.0.")[0] + "layers.0."  # fmt: skip
    renamed = {prefix + name: weight for name, weight in weights.items()}
    sanitize = getattr(target, "sanitize", None)
    sanitized = sanitize(renamed) if sanitize is not None else renamed
    found = {name.removeprefix(prefix): weight for name, weight in sanitized.items() if name.startswith(prefix)}
    layer = core.layers[0] if form.compose is None else form.compose(core.layers[0])
    layer.load_weights([(_renamed(name, form.own), weight) for name, weight in found.items()])
    cache = make_prompt_cache(target)[0]
    return layer, len(cache.caches) if isinstance(cache, CacheList) and form.compose is None else 1


def tables(model: Any, held: Mapping[str, mx.array] = MappingProxyType({})) -> tuple[Any, Any]:
    """The table of embeddings and the function to logits of the target, or those that a head has for itself."""
    core, holder = core_of(model), model
    if getattr(holder, "lm_head", None) is None:
        holder = getattr(model, "language_model", model)
    embed = getattr(getattr(model, "graft", None), "embed", None) or embeddings_of(core)
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
