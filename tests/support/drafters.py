"""Drafters in folders of their own beside tiny random models: DFlash and its kin, Gemma 4 assistants, and EAGLE-3.

Made with random weights, or so that they say what follows a token in a target whose layers add little to its embedding.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.utils import load_model, save_model
from mlx_vlm.utils import get_model_and_args

from tests.support.heads import damp
from tests.support.models import VOCAB, build, write
from worker.vision.multimodal_merge import text_core

# The token that a block has in the places that it guesses; no prompt of a test has it.
MASK = 5
SIZE, LAYERS = 64, 4
_BACKBONE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "num_target_layers": LAYERS, "block_size": 8,
}  # fmt: skip
_PLACES: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3], "num_target_layers": LAYERS}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "global_head_dim": 32,
    "num_global_key_value_heads": 4, "layer_types": ["full_attention"] * 2, "markov_rank": 8, "block_size": 7,
    "rope_parameters": {"full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                           "rope_type": "proportional"}},
}  # fmt: skip
# Configurations as published, by the form of drafter.
FORMS: dict[str, dict[str, Any]] = {
    "dflash": {**_BACKBONE, "architectures": ["DFlashDraftModel"], "dflash_config": _PLACES},
    "dflash, grouped heads and a window": {
        **_BACKBONE, **_SLIDING, "num_key_value_heads": 2, "architectures": ["DFlashDraftModel"],
        "dflash_config": _PLACES,
    },
    "dflash, causal": {
        **_BACKBONE, **_SLIDING, "architectures": ["DFlashDraftModel"], "dflash_config": {**_PLACES, "causal": True},
    },
    "dflash2": {
        **_BACKBONE, "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**_PLACES, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 16,
                          "selector_top_k": 12},
    },
    "dspark": {**_BACKBONE, "block_size": 7, "markov_rank": SIZE, "dflash_config": {**_PLACES, "block_size": 7}},
    "laguna": {
        **_BACKBONE, "model_type": "laguna", "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": 12,
        "layer_types": ["sliding_attention"] * 3, "gating": "per-head", "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "dflash_config": {**_PLACES, "block_size": 8, "causal": True},
    },
    "muse glimmer": {
        **_BACKBONE, **_PLACES, "model_type": "muse_glimmer_assistant", "num_hidden_layers": 3,
        "num_key_value_heads": 2, "sliding_window": 12,
    },
    "gemma4 dspark": {**_BACKBONE, **_GEMMA, **_PLACES},
}  # fmt: skip

_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": SIZE, "num_hidden_layers": 6, "intermediate_size": 128,
    "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB, "num_key_value_heads": 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16, "sliding_window": 32, "max_position_embeddings": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                                           "rope_type": "proportional"},
                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
}  # fmt: skip


def damped(folder: Path, factor: float = 0.12, architecture: str = "qwen3") -> Path:
    """A target for blocks, in which a mask says nothing."""
    build(architecture, folder)
    model, _ = load_model(folder)
    damp(model, factor)
    weights: Any = text_core(model).embed_tokens.weight
    weights[MASK] = 0
    save_model(folder, model)
    return folder


def gemma4(folder: Path, factor: float = 0.25) -> Path:
    """A Gemma 4 with windows, shared KV and inputs of each layer."""
    write(gemma4_text, _GEMMA4, folder)
    model, _ = load_model(folder)
    for layer in model.layers:
        for name in ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm"):
            layer[name].weight = layer[name].weight * factor
    save_model(folder, model)
    return folder


def drafter(folder: Path, config: dict[str, Any], seed: int = 3) -> Any:
    """A random drafter of mlx-vlm; `store` writes it."""
    write_config(folder, **config)
    classes, _ = get_model_and_args(config)
    mx.random.seed(seed)
    model = classes.Model(classes.ModelConfig.from_dict(config))
    model.apply(lambda array: array * 1.5 if array.ndim == 2 else array)
    return model


def store(model: Any, folder: Path) -> Path:
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    return folder


def copying_block(folder: Path, target: Path, form: str) -> Path:
    """A drafter of a block that says at each place what follows the newest token, DSpark the token before it."""
    model, own = drafter(folder, FORMS[form]), text_core(load_model(target)[0])
    eye = mx.eye(SIZE)
    model.fc.weight = mx.zeros_like(model.fc.weight)
    model.norm.weight = own.norm.weight
    for at, layer in enumerate(model.layers):
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
        layer.self_attn.v_proj.weight = eye
        layer.self_attn.o_proj.weight = eye * (at == 0)
    if form == "dspark":
        table = own.embed_tokens.weight
        model.markov_head.markov_w1.weight = mx.fast.rms_norm(table, own.norm.weight, 1e-6)
        model.markov_head.markov_w2.weight = table * 4
    return store(model, folder)


def assistant_config(**overrides: Any) -> dict[str, Any]:
    text = {
        **_GEMMA4, "num_hidden_layers": 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }  # fmt: skip
    return {"model_type": "gemma4_assistant", "backbone_hidden_size": SIZE, "text_config": text, **overrides}


def copying_assistant(folder: Path, target: Path) -> Path:
    """An assistant that says what follows a token, whatever came before."""
    model, (own, _) = drafter(folder, assistant_config()), load_model(target)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight = mx.zeros((SIZE,))
        layer.post_feedforward_layernorm.weight = mx.zeros((SIZE,))
    model.pre_projection.weight = mx.concatenate([mx.eye(SIZE), mx.zeros((SIZE, SIZE))], axis=1)
    model.model.embed_tokens.weight = own.model.embed_tokens.weight
    model.model.norm.weight = own.model.norm.weight
    return store(model, folder)


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle(folder: Path, **config: Any) -> Path:
    """A random drafter of one layer, with 300 tokens of its own: every other one of the target's from 2 on."""
    from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig

    layer = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCAB, "model_type": "llama"}  # fmt: skip
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 255,
             "target_hidden_size": 64, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "model_type": "eagle3",
             **config}  # fmt: skip
    write_config(folder, **whole)
    mx.random.seed(1)
    model = Model(ModelConfig.from_dict(whole))
    model.d2t = mx.arange(255) + 2
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    return folder
