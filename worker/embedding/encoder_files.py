"""Checkpoints of encoders: their shape from config.json, and the names of their weights."""

import re
from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx

from protocol.checkpoint import is_scaled, kind_of_scaling, rope_tables
from protocol.failures import Code
from worker.embedding.encoder_models import ACTIVATIONS, EncoderShape
from worker.errors import LoadFailed

_ROBERTA: Final = ("roberta", "xlm-roberta", "camembert")
_THETAS: Final = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
_PREFIX: Final = re.compile(r"^(bert|roberta|nomic_bert|model)\.")
_ENDS: Final = {".gamma": ".weight", ".beta": ".bias"}
# Patterns of weight names in the checkpoints of all families, with the corresponding part of `EncoderModel`. No name
# matches two patterns.
_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "embeddings.word."),
        (r"^embeddings\.position_embeddings\.", "embeddings.position."),
        (r"^embeddings\.token_type_embeddings\.", "embeddings.type."),
        (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
        (r"^encoder\.layers?\.", "layers."),
        (r"^final_norm\.", "norm."),
        (r"\.attention\.self\.(query|key|value)\.", r".attention.\1."),
        (r"\.self_attn\.q_proj\.", ".attention.query."),
        (r"\.self_attn\.k_proj\.", ".attention.key."),
        (r"\.self_attn\.v_proj\.", ".attention.value."),
        (r"\.attn\.Wqkv\.", ".attention.qkv."),
        (r"\.(attention\.output\.dense|attn\.out_proj|attn\.Wo|self_attn\.o_proj)\.", ".attention.out."),
        (r"\.(attention\.output\.LayerNorm|attn_norm|norm1|post_attention_layernorm)\.", ".attention_norm."),
        (r"\.(intermediate\.dense|mlp\.fc11|mlp\.up_proj)\.", ".inner.up."),
        (r"\.(mlp\.fc12|mlp\.gate_proj)\.", ".inner.gate."),
        (r"\.(output\.dense|mlp\.fc2|mlp\.down_proj|mlp\.Wo)\.", ".inner.down."),
        (r"\.(output\.LayerNorm|mlp_norm|norm2|post_mlp_layernorm)\.", ".inner_norm."),
        (r"^(pooler|head)\.dense\.", "classifier.dense."),
        (r"^head\.norm\.", "classifier.norm."),
        (r"^classifier\.out_proj\.", "classifier.score."),
        (r"^classifier\.(weight|bias|scales|biases)$", r"classifier.score.\1"),
    )
)
_PARTS: Final = ("query", "key", "value")
_FUSED: Final = ".mlp.Wi."


def shape_of(config: Mapping[str, Any]) -> EncoderShape:
    """Read the shape of an encoder. Raises `LoadFailed` for unsupported variants of the family."""
    kind = config.get("model_type")
    try:
        shape = (
            _modernbert(config) if kind == "modernbert" else _nomic(config) if kind == "nomic_bert" else _bert(config)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"config.json of this {kind} lacks or misstates {error}") from error
    if scaled := [kind_of_scaling(table) for table in rope_tables(config).values() if is_scaled(table)]:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"an encoder with scaled positions ({scaled[0]}) is not known")
    if shape.activation not in ACTIVATIONS:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"the activation {shape.activation!r} is not known")
    return shape


def classifier_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reranker's last layers. Raises `LoadFailed` if the classifier has several scores."""
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or 1
    if labels != 1:
        message = f"it tells {labels} classes apart; a reranker gives one score (num_labels 1)"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    if config.get("model_type") == "modernbert":
        return {
            "activation": str(config.get("classifier_activation", "gelu")),
            "norm_bias": bool(config.get("norm_bias", False)),
            "is_mean": config.get("classifier_pooling", "cls") == "mean",
            "bias": bool(config.get("classifier_bias", False)),
        }
    if config.get("model_type") == "nomic_bert":
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "rerankers of the architecture nomic_bert are not known")
    return {"activation": "tanh", "norm_bias": None, "is_mean": False, "bias": True}


def renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights under the names of `EncoderModel`, with projections fused and split as `EncoderModel` needs
    them.
    """
    named = {_name(name): array for name, array in weights.items()}
    for name in [name for name in named if ".attention.query." in name]:
        parts = [named.pop(name.replace(".query.", f".{part}.")) for part in _PARTS]
        named[name.replace(".query.", ".qkv.")] = mx.concatenate(parts)
    for name in [name for name in named if _FUSED in name]:
        # The activation applies to the first half, the gate.
        gate, up = mx.split(named.pop(name), 2)
        named[name.replace(_FUSED, ".inner.gate.")], named[name.replace(_FUSED, ".inner.up.")] = gate, up
    return named


def _name(name: str) -> str:
    name = _PREFIX.sub("", name)
    for old, new in _ENDS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    for pattern, part in _NAMES:
        name = pattern.sub(part, name)
    return name


def _bert(config: Mapping[str, Any]) -> EncoderShape:
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "BERT is served with absolute positions, as an encoder")
    is_roberta = config["model_type"] in _ROBERTA
    return EncoderShape(
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        inner=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config["max_position_embeddings"]),
        # RoBERTa's positions begin after its padding id.
        first_position=int(config.get("pad_token_id", 1)) + 1 if is_roberta else 0,
        types=int(config.get("type_vocab_size", 0)),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
    )


def _nomic(config: Mapping[str, Any]) -> EncoderShape:
    """Read nomic-bert's shape. The keys are GPT-2's, as in the model's first version, or those of transformers."""
    if config.get("num_experts") or config.get("prenorm") or config.get("rotary_emb_interleaved"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "nomic-bert is served without experts, norms first or other rotations")
    layers = int(_either(config, "num_hidden_layers", "n_layer"))
    theta = float(config.get("rotary_emb_base") or 1000.0)
    trained = config.get("max_trained_positions")
    positions = int(_either(config, "max_position_embeddings", "n_positions"))
    has_bias = bool(config.get("qkv_proj_bias", False))
    return EncoderShape(
        layers=layers,
        width=int(_either(config, "hidden_size", "n_embd")),
        heads=int(_either(config, "num_attention_heads", "n_head")),
        inner=int(_either(config, "intermediate_size", "n_inner")),
        vocabulary=int(config["vocab_size"]),
        # Inputs longer than those in training would need a scaled rotation, so the training length is the limit.
        positions=min(positions, int(trained)) if trained else positions,
        types=int(config.get("type_vocab_size", 0)),
        epsilon=float(config.get("layer_norm_eps") or config.get("layer_norm_epsilon") or 1e-12),
        activation=str(config.get("hidden_act") or config.get("activation_function") or "silu"),
        is_gated=True,
        has_attention_bias=has_bias,
        has_inner_bias=bool(config.get("mlp_fc1_bias", False)),
        has_learned_positions=False,
        thetas=(theta,) * layers,
    )


def _modernbert(config: Mapping[str, Any]) -> EncoderShape:
    layers = int(config["num_hidden_layers"])
    every = int(config.get("global_attn_every_n_layers") or 3)
    full, sliding = _THETAS
    kinds = config.get("layer_types") or [sliding if at % every else full for at in range(layers)]
    thetas = {
        full: float(config.get("global_rope_theta") or _THETAS[full]),
        sliding: float(config.get("local_rope_theta") or _THETAS[sliding]),
    }
    windows = {full: 0, sliding: int(config.get("local_attention", 128)) // 2}
    return EncoderShape(
        layers=layers,
        width=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        inner=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config.get("max_position_embeddings") or 8192),
        epsilon=float(config.get("norm_eps", 1e-5)),
        activation=str(config.get("hidden_activation", "gelu")),
        is_prenorm=True,
        is_gated=True,
        has_attention_bias=bool(config.get("attention_bias", False)),
        has_inner_bias=bool(config.get("mlp_bias", False)),
        has_norm_bias=bool(config.get("norm_bias", False)),
        has_learned_positions=False,
        windows=tuple(windows[kind] for kind in kinds),
        thetas=tuple(thetas[kind] for kind in kinds),
    )


def _either(config: Mapping[str, Any], *names: str) -> Any:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise KeyError(names[0])
    return value
