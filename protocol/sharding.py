"""Division of a model among the ranks of a group: which architectures of mlx-lm can be divided, and into how many
parts.

The gateway refuses impossible divisions before anything is loaded; the worker chooses the division.
"""

from collections.abc import Mapping
from typing import Any, Final

TENSOR: Final = "tensor"
PIPELINE: Final = "pipeline"
AUTO: Final = "auto"
RING: Final = "ring"
NCCL: Final = "nccl"
JACCL: Final = "jaccl"

# Architectures, by `model_type`, whose mlx-lm class has a `shard` or a pipeline; a test compares both with the library.
TENSOR_TYPES: Final = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "deepseek_v41_text", "exaone_moe", "glm4_moe",
        "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "iquestcoder", "iquestloopcoder", "joyai_llm_flash", "kimi_k2",
        "kimi_k25", "kimi_k3", "llama", "longcat_flash", "longcat_flash_ngram", "minimax", "minimax_m2",
        "minimax_m3_vl", "ministral3", "mistral", "mistral4", "muse_spark", "prism_hadamard_qwen35", "qwen2", "qwen3",
        "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open", "step3p5", "xverse",
    }
)  # fmt: skip
PIPELINE_TYPES: Final = frozenset(
    {
        "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "deepseek_v41_text",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_k3",
        "minimax_m3_vl", "ministral3", "mistral4", "muse_spark", "prism_hadamard_qwen35", "qwen2", "qwen3_5",
        "qwen3_5_moe", "qwen3_moe", "qwen3_next", "solar_open",
    }
)  # fmt: skip
# Architectures that repeat key and value heads if the model has fewer of them than the group has ranks.
_REPEATS: Final = frozenset({"qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"})
# Configuration keys of sizes that are divided among the ranks.
_HEADS: Final = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
_WIDTHS: Final = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def resolve(config: Mapping[str, Any], parallel: str, backend: str, *, has_cuda: bool) -> tuple[str, str]:
    """Resolve an `auto` backend to NCCL if MLX computes on CUDA, otherwise to a ring; also resolve `auto` parallelism.

    A ring gets a pipeline if the architecture has one, because each layer of a tensor-parallel model waits for the
    network twice.
    """
    backend = (NCCL if has_cuda else RING) if backend == AUTO else backend
    if parallel == AUTO:
        kind = config.get("model_type")
        is_tensor = kind in TENSOR_TYPES and (backend != RING or kind not in PIPELINE_TYPES)
        parallel = TENSOR if is_tensor else PIPELINE
    return parallel, backend


def parts_of(ranks: int, split: tuple[int, ...] | list[int]) -> list[float]:
    """Return each rank's share of a model.

    `split` has the number of layers of each rank; if empty, all shares are equal.
    """
    return [layers / sum(split) for layers in split] if split else [1 / max(1, ranks)] * ranks


def refusal(
    config: Mapping[str, Any], parallel: str, ranks: int, split: tuple[int, ...] | list[int] = (), backend: str = ""
) -> str:
    """Return the reason why a model cannot be divided as requested; empty if it can."""
    kind = config.get("model_type")
    if parallel == PIPELINE and backend == NCCL:
        return "NCCL in MLX cannot send from rank to rank: there is no pipeline over it; use parallel = 'tensor'"
    types = TENSOR_TYPES if parallel == TENSOR else PIPELINE_TYPES
    if kind not in types:
        other = "pipeline" if kind in PIPELINE_TYPES else "tensor" if kind in TENSOR_TYPES else ""
        hint = f"; parallel = '{other}' can be used" if other and other != parallel else "; it needs one process"
        return f"mlx-lm cannot run '{kind}' {parallel}-parallel{hint}"
    text = _text(config)
    if parallel == PIPELINE:
        return _pipeline_refusal(text, ranks, split)
    if split:
        return "split is for a pipeline; tensor-parallel ranks have equal parts"
    return _tensor_refusal(kind in _REPEATS, text, ranks) or _groups_refusal(config, text, ranks)


def _pipeline_refusal(text: Mapping[str, Any], ranks: int, split: tuple[int, ...] | list[int]) -> str:
    layers = text.get("num_hidden_layers")
    if not isinstance(layers, int):
        return ""
    if split and (len(split) != ranks or sum(split) != layers or min(split) < 1):
        return f"split: {list(split)} must have {ranks} numbers above 0 that sum to the model's {layers} layers"
    return f"{layers} layers are too few for {ranks} ranks" if layers < ranks else ""


def _tensor_refusal(repeats: bool, text: Mapping[str, Any], ranks: int) -> str:
    for name in (*_HEADS, *_WIDTHS):
        count = text.get(name)
        if isinstance(count, int) and count % ranks:
            return f"{name} = {count} cannot be divided by {ranks} ranks"
    kv_heads = text.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads % ranks and not (repeats and ranks % kv_heads == 0):
        return f"num_key_value_heads = {kv_heads} cannot be divided by {ranks} ranks"
    return ""


def _groups_refusal(config: Mapping[str, Any], text: Mapping[str, Any], ranks: int) -> str:
    """Refuse a division that would split a quantization group, whose values share a scale."""
    quantization = config.get("quantization") or config.get("quantization_config")
    size = quantization.get("group_size") if isinstance(quantization, dict) else None
    if not isinstance(size, int):
        return ""
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head = text.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None)
    widths = {name: text.get(name) for name in _WIDTHS}
    widths["the width of attention"] = heads * head if isinstance(heads, int) and isinstance(head, int) else None
    for name, width in widths.items():
        if isinstance(width, int) and width and width // ranks % size:
            return f"{name} = {width} by {ranks} ranks is no multiple of the quantization's group of {size}"
    return ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
