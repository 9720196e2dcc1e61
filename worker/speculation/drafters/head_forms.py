"""Formats of MTP heads in checkpoints: the names of their tensors, the order of their inputs, and their layer.

All formats are those of published checkpoints, as vLLM and SGLang read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

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
