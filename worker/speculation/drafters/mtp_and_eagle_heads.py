"""Heads for multi-token prediction (MTP) and EAGLE-3: their formats in checkpoints, their layers, and their loader.

Formats of MTP heads in checkpoints: the names of their tensors, the order of their inputs, and their layer.

All formats are those of published checkpoints, as vLLM and SGLang read them.

Head for multi-token prediction (MTP): one more layer, which predicts a token from the hidden state two positions
before it and the token between them.

The layer is of the target's own class, so it supports the caches of a batch.

Loader of heads for multi-token prediction: finds and reads the weights in a checkpoint, and builds the head.

EAGLE-3 head: its input is states of three of the target's layers, and it has a vocabulary of its own.

The layers are mlx-vlm's; mlx-vlm's loop and caches are not used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.checkpoint import is_head, unused
from protocol.model_files import weight_files
from worker.model.checkpoint_view import files_of
from worker.speculation.drafters.target import core_of, evaluate_weights, tables
from worker.vision.multimodal_merge import text_core

Sizes = Mapping[str, Any]
"""The configuration of a text model."""


@dataclass(slots=True, frozen=True)
class HeadForm:
    """Names and configuration of one format of head.

    The head's tensors begin with one of `prefixes`, in which `{layers}` is the number of the target's layers. `parts`
    maps the names of the head's own tensors, and `tables` the names of tables that some checkpoints store a second time
    for the head. The layer's tensors begin with `layer`; `renames` maps prefixes of their names to those of the
    target's layer. If the head's layer is a part of the target's, `compose` extracts it, and `own` maps prefixes to the
    names in the extracted layer.
    """

    prefixes: Sequence[str]
    parts: Mapping[str, str]
    tables: Mapping[str, str]
    layer: str = ""
    renames: Sequence[tuple[str, str]] = ()
    compose: Callable[[Any], Any] | None = None
    own: Sequence[tuple[str, str]] = ()
    # Changes to the configuration that make the head's layer the first layer of a model.
    changes: Callable[[Sizes], dict[str, Any]] = lambda _sizes: {}
    # Whether the head's input is the hidden state followed by the embedding, instead of the reverse.
    is_hidden_first: bool = False
    # Whether the head takes hidden states without the target's last norm.
    is_fed_raw: bool = False
    # Whether published files store the weights of norms minus 1.
    is_zero_centered: bool = False


class _HalfLayer(nn.Module):
    """First half of a layer of LongCat, which has two attentions, each with a dense MLP."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn[0], layer.mlps[0]
        self.input_layernorm, self.post_attention_layernorm = (
            norms[0] for norms in (layer.input_layernorm, layer.post_attention_layernorm)
        )

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache)
        mixed: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


_NEXTN_PARTS: Final = {"eh_proj": "fc", "enorm": "enorm", "hnorm": "hnorm"}
# Modules that a LongCat layer has twice.
_LONGCAT_PAIRS: Final = ("self_attn", "input_layernorm", "post_attention_layernorm")
_TABLES: Final = {"embed_tokens.weight": "embed", "shared_head.head.weight": "lm_head"}


def _exaone(sizes: Sizes) -> dict[str, Any]:
    """Return the changes that make the head one dense layer. Its attention type is the one configured for heads, or
    else that of the first layer."""
    kinds = list(sizes["layer_types"])
    own = (sizes.get("mtp_layer_types") or kinds)[0]
    # mlx-lm's class applies rotary positions in layers with full attention only if no layer has a window. So the types
    # of the model's other layers stay in the list.
    return {"layer_types": [own, *kinds], "is_moe_layer": [False]}


def _mimo_v2(_sizes: Sizes) -> dict[str, Any]:
    """Return the changes that make the head one dense layer with a window. The target's class needs a layer of each
    type."""
    return {"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]}


def _step(sizes: Sizes) -> dict[str, Any]:
    """Return the changes that make the head one dense layer.

    Configuration lists have an entry per layer, with the heads' entries last. If a list has no entries for heads, the
    entry of a layer with a window applies.
    """
    layers, kinds = int(sizes["num_hidden_layers"]), list(sizes["layer_types"])
    at = layers if len(kinds) > layers else kinds.index("sliding_attention")
    lists = ("layer_types", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared", "rope_theta")
    held = {name: sizes[name] for name in lists if isinstance(sizes.get(name), list)}
    return {**{name: entries[at : at + 1] for name, entries in held.items()}, "moe_layers_enum": None}


QWEN: Final = HeadForm(
    ("mtp.", "language_model.mtp.", "model.mtp."),
    {"fc": "fc", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "norm"},
    {},
    layer="layers.0.",
    is_zero_centered=True,
)
_NEXTN: Final = HeadForm(("model.layers.{layers}.",), {**_NEXTN_PARTS, "shared_head.norm": "norm"}, _TABLES)
# Formats by the target's `model_type`. A head in a file of its own may have Qwen's format with any target.
FORMS: Final[Mapping[str, HeadForm]] = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "deepseek_v3": _NEXTN,
    "deepseek_v32": _NEXTN,
    "glm_moe_dsa": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "exaone_moe": HeadForm(QWEN.prefixes, QWEN.parts, {}, layer="layers.0.", changes=_exaone),
    "mimo": HeadForm(
        ("model.mtp_layers.0.",),
        {"input_proj": "fc", "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "final_layernorm": "norm"},
        {},
        is_hidden_first=True,
    ),
    "mimo_v2_flash": HeadForm(
        ("model.mtp.layers.0.",),
        {**_NEXTN_PARTS, "final_layernorm": "norm"},
        {},
        renames=(("pre_mlp_layernorm.", "post_attention_layernorm."),),
        changes=_mimo_v2,
    ),
    "ernie4_5_moe": HeadForm(
        ("model.mtp_",),
        {"linear_proj.0": "fc", "emb_norm.0": "enorm", "hidden_norm.0": "hnorm"},
        {},
        layer="block.0.",
        changes=lambda _sizes: {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "step3p5": HeadForm(
        ("model.layers.{layers}.",),
        {**_NEXTN_PARTS, "shared_head.norm": "norm"},
        {"embed_tokens.weight": "embed", "shared_head.output.weight": "lm_head"},
        renames=(("transformer.", ""),),
        changes=_step,
        is_fed_raw=True,
        is_zero_centered=True,
    ),
    "longcat_flash": HeadForm(
        ("model.mtp.layers.0.", "model.mtp."),
        {"eh_proj": "fc", "enorm.m": "enorm", "hnorm.m": "hnorm", "norm": "norm"},
        {"embed_tokens.weight": "embed"},
        renames=(
            ("transformer_layer.mlp.", "mlps.0."),
            *((f"{name}.", f"{name}.0.") for name in _LONGCAT_PAIRS),
        ),
        changes=lambda _sizes: {"num_layers": 1},
        compose=_HalfLayer,
        own=(("mlps.0.", "mlp."), *((f"{name}.0.", f"{name}.") for name in _LONGCAT_PAIRS)),
    ),
    "bailing_moe": HeadForm(
        ("model.layers.{layers}.",),
        {**_NEXTN_PARTS, "final_layernorm": "norm"},
        {},
        changes=lambda _sizes: {"norm_head": False},
    ),
}


Transform = Callable[[mx.array], mx.array]


class PredictionHead(nn.Module):
    """Prediction head bound to its target. It uses the target's embedding table and `lm_head`, or its own.

    Its output is a hidden state, from which logits are computed. When the head continues after its own draft, this
    state replaces the target's.
    """

    def __init__(
        self, layer: Any, size: int, eps: float, form: HeadForm, *, has_norm: bool = True, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(size, eps=eps)
        self.hnorm = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps=eps) if has_norm else nn.Identity()
        self.size = size
        # Size of the sliding window of the layer's attention; None if the layer attends to all tokens.
        self.window: int | None = None
        # Number of the layer's caches: one for KV and, with sparse attention, a second one for the index.
        self.caches = 1
        self._form = form
        self.tokens = 0
        # `bind` sets this field and the next one. The underscores keep both fields out of the head's parameters.
        self._tables: tuple[Transform, Transform]
        self._final: Transform

    def bind(self, embed: Any, lm_head: Transform, final: Transform) -> None:
        """Set the embedding table, the function from hidden states to logits, and the target's last norm."""
        self._tables, self._final = (embed, lm_head), final
        self.tokens = int(embed.weight.shape[0])

    def make_caches(self) -> list[Any]:
        return [KVCache() if self.caches == 1 else CacheList(*(KVCache() for _ in range(self.caches)))]

    def hidden(self, states: mx.array) -> mx.array:
        """Return the head's input: the captured states, after the target's last norm if the head takes normalized
        states."""
        return states if self._form.is_fed_raw else self._final(states)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Return hidden states `[rows, width, size]`, given ids `[rows, width]` and the hidden states before them."""
        cache = caches[0]
        seen = cache[0] if self.caches > 1 else cache
        pair = [self.enorm(self._tables[0](tokens)), self.hnorm(hidden)]
        x = self.fc(mx.concatenate(pair[::-1] if self._form.is_hidden_first else pair, axis=-1))
        mask = create_attention_mask(x, seen, window_size=self.window, return_array=x.shape[1] > 1)
        state = self.layer(x, mask, cache=cache)
        return state if self._form.is_fed_raw else self.norm(state)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._tables[1](self.norm(hidden) if self._form.is_fed_raw else hidden)


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


class EagleHead:
    """EAGLE-3 drafter in the format of Speculators and SGLang, loaded by mlx-vlm and bound to its target."""

    def __init__(self, model: Any, target: Any, vocab: int, dtype: mx.Dtype) -> None:
        """Raises ValueError if the drafter was made for another model."""
        self._model = model.bind(target)
        self._vocab = vocab
        self.size = int(model.hidden_size)
        self.tokens = int(self._model.embed_tokens.weight.shape[0])
        # Indices of the target's layers whose inputs the head takes.
        self.places: list[int] = [int(at) for at in model.config.target_layer_ids]
        ids = mx.arange(model.draft_vocab_size)
        self._ids = ids if model.d2t is None else ids + model.d2t
        lowest: Any = mx.min(self._ids).item()
        highest: Any = mx.max(self._ids).item()
        # Drafted ids also index the head's own embedding table, and MLX checks no bounds.
        if lowest < 0 or highest >= min(vocab, self.tokens):
            raise ValueError("its tokens are not the target's")
        core = text_core(target)
        if not all(0 <= place < len(core.layers) for place in self.places):
            raise ValueError(f"it needs the layers {self.places} of a target that has {len(core.layers)}")
        self.hidden(mx.zeros((1, 1, core.norm.weight.shape[0] * len(self.places)), dtype))

    @classmethod
    def load(cls, path: Path, target: Any, vocab: int, dtype: mx.Dtype) -> tuple["EagleHead", int]:
        """Load the head in a folder; return it with its weights' bytes. Raises ValueError and mlx-vlm's errors."""
        from mlx_vlm.speculative.drafters import load_drafter

        model: Any
        model, kind = load_drafter(str(path))
        if kind != "eagle3":
            raise ValueError(f"it is a drafter of the kind {kind}")
        own_bytes = evaluate_weights(model, dtype)  # the target's tables are not among the weights yet
        return cls(model, target, vocab, dtype), own_bytes

    def make_caches(self) -> list[Any]:
        return [KVCache() for _ in self._model.layers]

    def hidden(self, states: mx.array) -> mx.array:
        if self._model.input_norm is not None:
            states = self._model.input_norm(states)
        return self._model.fc(states)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        first, *rest = self._model.layers
        mask = create_attention_mask(hidden, caches[0])
        hidden = first(self._model.embed_tokens(tokens), hidden, mask, caches[0], None)
        for layer, cache in zip(rest, caches[1:], strict=True):
            hidden = layer(hidden, mask, cache, None)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        hidden = self._model.norm(hidden)
        table = self._model.lm_head or self._model.embed_tokens.as_linear
        own = table(hidden)
        whole = mx.full((*own.shape[:-1], self._vocab), -mx.inf, dtype=own.dtype)
        whole[..., self._ids] = own
        return whole
