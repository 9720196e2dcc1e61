"""Heads for multi-token prediction beside tiny random models, of which some tokens of each draft are right."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa
from mlx_lm.utils import load_model, save_config, save_model

from protocol.model_files import INDEX
from tests.support.models import VOCAB, build, tiny_tokenizer

# Residual branches of the target, made so small that the next token is mostly a function of the one before.
DAMPED = ("o_proj", "out_proj", "down_proj")

_NEXTN: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "vocab_size": VOCAB, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "tie_word_embeddings": False, "rope_scaling": None,
}  # fmt: skip
_MLA: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_INDEXER: dict[str, Any] = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}
NEXTN: dict[str, tuple[Any, dict[str, Any]]] = {
    "glm4_moe": (glm4_moe, {**_NEXTN, "model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True,
                            "attention_bias": False, "partial_rotary_factor": 0.5}),
    "glm4_moe_lite": (glm4_moe_lite, {**_NEXTN, **_MLA, "model_type": "glm4_moe_lite"}),
    "deepseek_v3": (deepseek_v3, {**_NEXTN, **_MLA, "model_type": "deepseek_v3"}),
    "deepseek_v32": (deepseek_v32, {**_NEXTN, **_MLA, "model_type": "deepseek_v32", **_INDEXER}),
    "glm_moe_dsa": (glm_moe_dsa, {**_NEXTN, **_MLA, **_INDEXER, "model_type": "glm_moe_dsa", "moe_layer_freq": 1,
                                  "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False,
                                  "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
}  # fmt: skip


def build_with_head(architecture: str, folder: Path, *, damping: float = 0.12, **overrides: Any) -> Path:
    """A random model with a head that copies the way from a token's embedding to the logits, in `mtp.safetensors`.

    The head leaves out what the target's layers add, which is little: it is mostly right, and sometimes wrong.
    """
    build(architecture, folder, **overrides)
    model, config = load_model(folder)
    damp(model, damping)
    save_model(folder, model)
    sizes = config.get("text_config", config)
    save_head(folder / "mtp.safetensors", model, int(sizes["hidden_size"]), "mlx")
    return folder


def damp(model: Any, factor: float) -> None:
    for name, module in model.named_modules():
        if name.endswith(DAMPED) and "weight" in module:
            module.weight = module.weight * factor


def save_head(file: Path, model: Any, size: int, form: str) -> None:
    """A head of Qwen's form for a model, which does nothing but hand the embedding through."""
    inner = getattr(model, "language_model", model).model
    layer = next(each for each in inner.layers if not getattr(each, "is_linear", False))
    copy = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    weights = {
        "mtp.fc.weight": copy,
        "mtp.pre_fc_norm_embedding.weight": mx.ones((size,)),
        "mtp.pre_fc_norm_hidden.weight": mx.ones((size,)),
        "mtp.norm.weight": inner.norm.weight,
    }
    flat: Any = tree_flatten(layer.parameters())
    for name, array in flat:
        is_out = name.endswith(tuple(f"{each}.weight" for each in DAMPED))
        weights[f"mtp.layers.0.{name}"] = array * 0 if is_out else array
    mx.save_safetensors(str(file), weights, {"format": form})


def build_with_layer(architecture: str, folder: Path) -> Path:
    """A random model with a head of DeepSeek's form: a layer behind the last, as such checkpoints are published."""
    module, config = NEXTN[architecture]
    folder.mkdir(parents=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = {**config, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.apply(lambda array: array * 1.5 if array.ndim == 2 else array)
    damp(model, 0.3)
    save_model(folder, model)
    save_config(config, config_path=folder / "config.json")
    prefix, size = f"model.layers.{config['num_hidden_layers']}.", config["hidden_size"]
    weights = {
        "eh_proj.weight": mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1),
        "enorm.weight": mx.ones((size,)),
        "hnorm.weight": mx.ones((size,)),
        "shared_head.norm.weight": model.model.norm.weight,
        "shared_head.head.weight": model.lm_head.weight,
        "embed_tokens.weight": model.model.embed_tokens.weight,
        **_published(model.model.layers[-1], config),
    }
    file = folder / "model-head.safetensors"
    mx.save_safetensors(str(file), {prefix + name: array for name, array in weights.items()}, {"format": "pt"})
    (folder / INDEX).unlink()  # which names the other file alone
    return folder


def _published(layer: Any, config: dict[str, Any]) -> dict[str, mx.array]:
    """The weights of a layer under the names, and in the shapes, that mlx-lm's classes convert; its outputs are 0."""
    weights: dict[str, mx.array] = {}
    flat: dict[str, mx.array] = dict(tree_flatten(layer.parameters()))
    if "self_attn.embed_q.weight" in flat:
        keys, values = flat.pop("self_attn.embed_q.weight"), flat.pop("self_attn.unembed_out.weight")
        merged = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        weights["self_attn.kv_b_proj.weight"] = merged.reshape(-1, config["kv_lora_rank"])
    for name, array in flat.items():
        array = array * 0 if name.endswith(tuple(f"{each}.weight" for each in DAMPED)) else array
        head, _, part = name.partition("switch_mlp.")
        experts = {f"{head}experts.{at}.{part}": array[at] for at in range(len(array))} if part else {name: array}
        weights |= experts
    return weights
