"""Tiny random vision models of each family, in the layout of mlx-community's checkpoints, and media for them."""

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from tests.support.models import tiny_tokenizer
from worker.vision.media import Grid, Medium, Span, positions

VOCAB = 640
TEXT = 500
IMAGE, VIDEO, AUDIO = 600, 601, 602
_PLACEHOLDER = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "patch_size": 8, "image_size": 32,
}  # fmt: skip
_QWEN_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 2, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 603, "vision_end_token_id": 604,
}  # fmt: skip


def _mrope(section: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"type": "default", "rope_type": "default", "mrope_section": list(section), **more}


_OLD_MROPE = {**_TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
_INTERLEAVED = {**_TEXT, "rope_scaling": _mrope([4, 2, 2], mrope_interleaved=True)}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "partial_rotary_factor": 0.5,
    "rope_parameters": _mrope([2, 1, 1], mrope_interleaved=True, rope_theta=10000.0, partial_rotary_factor=0.5),
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_QWEN_IDS, **_OLD_MROPE, "text_config": {"model_type": "qwen2_vl", **_OLD_MROPE},
        "vision_config": {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2,
                          "mlp_ratio": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
                          "in_channels": 3},
    },
    "qwen2_5_vl": {
        **_QWEN_IDS, **_OLD_MROPE, "text_config": {"model_type": "qwen2_5_vl", **_OLD_MROPE},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen2_5_vl", "window_size": 32, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_QWEN_IDS, "text_config": {"model_type": "qwen3_vl_text", **_INTERLEAVED},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_vl", "num_position_embeddings": 64,
                          "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        **_QWEN_IDS, "text_config": {"model_type": "qwen3_5_text", **_TEXT, **_LINEAR},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5", "num_position_embeddings": 64,
                          "deepstack_visual_indexes": []},
    },
    "qwen3_vl_moe": {
        **_QWEN_IDS, "text_config": {"model_type": "qwen3_vl_moe_text", **_INTERLEAVED, **_EXPERTS},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_vl_moe", "num_position_embeddings": 64,
                          "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5_moe": {
        **_QWEN_IDS, "text_config": {"model_type": "qwen3_5_moe_text", **_TEXT, **_LINEAR, **_EXPERTS},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_moe", "num_position_embeddings": 64,
                          "deepstack_visual_indexes": []},
    },
    "gemma3": {
        "image_token_index": IMAGE, "mm_tokens_per_image": 4, "hidden_size": 64, "vocab_size": VOCAB,
        "text_config": {"model_type": "gemma3_text", **_TEXT, "sliding_window": 24, "sliding_window_pattern": 2,
                        "query_pre_attn_scalar": 16, "rope_local_base_freq": 1000.0, "mm_tokens_per_image": 4},
        "vision_config": _SIGLIP,
    },
    "gemma3n": {
        "image_token_id": IMAGE, "audio_token_id": AUDIO, "eoi_token_id": 599, "eoa_token_id": 603, "hidden_size": 64,
        "vocab_size": VOCAB, "audio_soft_tokens_per_image": 6,
        "text_config": {"model_type": "gemma3n_text", **_TEXT, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                        "intermediate_size": [64] * 6, "vocab_size_per_layer_input": 596,
                        "hidden_size_per_layer_input": 8, "laurel_rank": 8,
                        "altup_num_inputs": 2, "altup_active_idx": 0, "altup_coef_clip": 120.0,
                        "altup_correct_scale": True, "final_logit_softcapping": 30.0, "sliding_window": 24,
                        "rope_local_base_freq": 1000.0, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
                        "layer_types": ["sliding_attention", "full_attention"] * 3},
        "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 32, "vocab_offset": 596, "vocab_size": 6},
        "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 32, "input_feat_size": 128, "vocab_size": 38,
                         "vocab_offset": 602, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2,
                         "conf_attention_chunk_size": 4, "conf_attention_context_left": 5,
                         "sscp_conv_channel_size": [8, 4]},
    },
    "gemma4": {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "hidden_size": 64,
        "vocab_size": VOCAB,
        "text_config": {"model_type": "gemma4_text", **_TEXT, "tie_word_embeddings": True, "num_hidden_layers": 6,
                        "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
                        "hidden_size_per_layer_input": 8, "sliding_window": 24, "sliding_window_pattern": 3,
                        "use_double_wide_mlp": False, "use_bidirectional_attention": "vision",
                        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                        "rope_parameters": {
                            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0,
                                               "rope_type": "proportional"},
                            "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"}}},
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64,
                          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                          "global_head_dim": 16, "patch_size": 8, "position_embedding_size": 64,
                          "default_output_length": 4, "pooling_kernel_size": 2},
        "audio_config": {"model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "subsampling_conv_channels": [128, 4], "attention_chunk_size": 4,
                         "attention_context_left": 5, "output_proj_dims": 48, "use_clipped_linears": False},
    },
    "gemma4_unified": {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "hidden_size": 64,
        "vocab_size": VOCAB,
        "text_config": {"model_type": "gemma4_unified_text", **_TEXT, "tie_word_embeddings": True,
                        "num_hidden_layers": 6, "global_head_dim": 32, "num_global_key_value_heads": 1,
                        "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                        "sliding_window": 24, "sliding_window_pattern": 3, "use_double_wide_mlp": False,
                        "use_bidirectional_attention": "vision",
                        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
                        "rope_parameters": {
                            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0,
                                               "rope_type": "proportional"},
                            "sliding_attention": {"rope_theta": 1000.0, "rope_type": "default"}}},
        "vision_config": {"model_type": "gemma4_unified_vision", "patch_size": 8, "pooling_kernel_size": 2,
                          "model_patch_size": 16, "mm_embed_dim": 32, "mm_posemb_size": 16, "num_soft_tokens": 4,
                          "output_proj_dims": 32},
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_samples_per_token": 640,
                         "audio_embed_dim": 640, "hidden_size": 640, "output_proj_dims": 640},
    },
    "idefics3": {
        "image_token_id": IMAGE, "scale_factor": 2, "vocab_size": VOCAB,
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": {**_SIGLIP, "model_type": "idefics3_vision"},
    },
    "smolvlm": {
        "image_token_id": IMAGE, "scale_factor": 2, "vocab_size": VOCAB,
        "text_config": {"model_type": "llama", **_TEXT}, "vision_config": {**_SIGLIP, "model_type": "smolvlm_vision"},
    },
    "llava": {
        "image_token_index": IMAGE, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    "pixtral": {
        "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "rope_theta": 10000.0},
    },
    "mistral3": {
        "image_token_index": IMAGE, "vision_feature_layer": -1, "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "rope_theta": 10000.0},
    },
    "lfm2_vl": {
        "image_token_id": IMAGE, "image_token_index": IMAGE, "downsample_factor": 2, "projector_hidden_size": 64,
        "projector_bias": True,
        "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"],
                        "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6,
                        "block_dim": 64, "conv_dim": 64, "block_ff_dim": 64, "num_heads": 4,
                        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "full_attn_idxs": [2]},
        "vision_config": {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 64},
    },
}  # fmt: skip


def build(family: str, folder: Path, *, seed: int = 0, changes: dict[str, Any] | None = None) -> Path:
    """A random model of `family` with a byte-level tokenizer, or with the one that the folder has.

    `changes` are of the configuration, by the name of its section; "" is the root.
    """
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    from worker.vision.checkpoint import tower_config

    config: dict[str, Any] = deepcopy({"model_type": family, "eos_token_id": 2, **FAMILIES[family]})
    for section, values in (changes or {}).items():
        (config[section] if section else config).update(values)
    if not (folder / "tokenizer.json").exists():
        tiny_tokenizer().save_pretrained(folder)
    classes, _ = get_model_and_args(tower_config(config))
    sections = ["text", "vision", "perceiver", "projector", "audio"]
    model_config = classes.ModelConfig.from_dict(tower_config(config))
    model = classes.Model(update_module_configs(model_config, classes, tower_config(config), sections))
    randomize(model, seed)
    if family.startswith(
        "gemma4"
    ):  # which does not scale the products of queries and keys: random ones would be too sharp
        for layer in model.language_model.model.layers:
            layer.self_attn.q_norm.weight = layer.self_attn.q_norm.weight * 0.2
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def randomize(model: Any, seed: int) -> None:
    """Weights large enough that greedy decoding can tell tokens, and media, apart."""
    rng = np.random.default_rng(seed)

    def draw(path: str, array: mx.array) -> mx.array:
        if array.ndim == 0:  # a bound
            return array
        if array.ndim < 2:
            is_scale = path.endswith("weight") or "norm" in path or "A_log" in path
            return mx.array((is_scale + 0.1 * rng.standard_normal(array.shape)).astype(np.float32))
        fan = 1.0 if "embed_tokens" in path else float(np.prod(array.shape[1:])) ** -0.5
        return mx.array((1.3 * fan * rng.standard_normal(array.shape)).astype(np.float32))

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())


@dataclass(slots=True)
class MediaPrompt:
    """Ids with spans in them."""

    ids: list[int]
    media: list[Span]
    positions: Any


@dataclass(slots=True, eq=False)
class GridMedium(Medium):
    """A medium that knows its size in patches: time, height, width."""

    grid: tuple[int, int, int] = (1, 1, 1)


def image(family: str, rng: np.random.Generator, height: int, width: int) -> Medium:
    """An image of `height` × `width` patches of 8 pixels, as the family's processor would hand it to the tower."""
    inputs: dict[str, Any]
    grid = (1, height, width)
    if family.startswith("qwen"):
        pixels = rng.standard_normal((height * width, 3 * 2 * 8 * 8))
        inputs = {"pixel_values": pixels, "image_grid_thw": np.array([grid])}
        tokens = height * width // 4
    elif family == "lfm2_vl":
        inputs = {
            "pixel_values": rng.standard_normal((1, 16, 3 * 8 * 8)),
            "spatial_shapes": np.array([[4, 4]]),
            "pixel_attention_mask": np.ones((1, 16), dtype=np.int64),
        }
        tokens = 4
    elif family in ("idefics3", "smolvlm"):
        inputs, tokens = {"pixel_values": rng.standard_normal((1, 1, 3, 32, 32))}, 4
    elif family == "gemma4_unified":
        places = np.stack(np.meshgrid(np.arange(width // 2), np.arange(height // 2)), -1).reshape(1, -1, 2)
        tokens = places.shape[1]
        inputs = {"pixel_values": rng.standard_normal((1, tokens, 768)), "image_position_ids": places}
    elif family == "gemma3n":
        inputs, tokens = {"pixel_values": rng.standard_normal((1, 3, 512, 512))}, 257
    elif family in ("pixtral", "mistral3"):
        inputs = {"pixel_values": rng.standard_normal((1, 3, 32, 32)), "image_sizes": np.array([[32, 32]])}
        tokens = 16 if family == "pixtral" else 4
    else:
        inputs, tokens = (
            {"pixel_values": rng.standard_normal((1, 3, 32, 32))},
            4 if family in ("gemma3", "gemma4") else 16,
        )
    return _medium("image", inputs, grid, tokens)


def sound(family: str, rng: np.random.Generator, tokens: int) -> Medium:
    """A clip of so many tokens."""
    if family == "gemma4_unified":
        features, frames = rng.standard_normal((1, tokens, 640)), tokens
    else:
        # Of Gemma 3n every clip has as many tokens, and one behind them; frames after the sound are masked.
        frames = 4 * tokens - 1
        features = rng.standard_normal((1, frames + 8, 128))
    mask = np.arange(features.shape[1])[None] < frames
    count = FAMILIES[family]["audio_soft_tokens_per_image"] + 1 if family == "gemma3n" else tokens
    return _medium(
        "audio", {"input_features": features * mask[..., None], "input_features_mask": mask}, (1, 1, 1), count
    )


def video(rng: np.random.Generator, frames: int, height: int, width: int) -> Medium:
    """A clip for the Qwen families: two frames a group."""
    groups = frames // 2
    inputs = {
        "pixel_values_videos": rng.standard_normal((groups * height * width, 3 * 2 * 8 * 8)),
        "video_grid_thw": np.array([(groups, height, width)]),
    }
    return _medium("video", inputs, (groups, height, width), groups * height * width // 4)


def _medium(kind: str, inputs: dict[str, Any], grid: tuple[int, int, int], tokens: int) -> Medium:
    arrays = {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in inputs.items()}
    digest = hashlib.blake2b(b"".join(array.tobytes() for array in arrays.values()), digest_size=32)
    return GridMedium(kind, digest.digest(), tokens, lambda: dict(arrays), grid)


def prompt(family: str, seed: int, parts: Sequence[int | Medium]) -> MediaPrompt:
    """Text of so many tokens, and media between it."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    spans: list[Span] = []
    blocks: list[tuple[int, Grid]] = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(8, TEXT, part).tolist()
            continue
        assert isinstance(part, GridMedium)
        time, height, width = part.grid
        if part.kind == "video" and family.startswith("qwen3"):
            for group in range(time):
                ids += rng.integers(8, TEXT, 3).tolist()
                rows = height * width // 4
                spans.append(Span(len(ids), len(ids) + rows, part, group * rows))
                blocks.append((len(ids), Grid(1, height // 2, width // 2)))
                ids += [VIDEO] * rows
        elif family == "pixtral":
            for row in range(4):
                spans.append(Span(len(ids), len(ids) + 4, part, 4 * row))
                ids += [*[IMAGE] * 4, 9]
        else:
            spans.append(Span(len(ids), len(ids) + part.tokens, part))
            if family.startswith("qwen"):
                blocks.append((len(ids), Grid(time, height // 2, width // 2)))
            ids += [_PLACEHOLDER[part.kind]] * part.tokens
    in_space = positions(len(ids), blocks) if family.startswith("qwen") else None
    return MediaPrompt(ids, spans, in_space)
