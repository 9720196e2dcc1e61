"""Tiny random models of every cache kind, built once per test run: real MLX, real tokenizers, no download."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import (
    afm7,
    gemma3_text,
    gpt_bigcode,
    gpt_oss,
    llama,
    llama4,
    mamba,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from mlx_lm.utils import save_config, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.scale import FULL, scaled

VOCAB = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = r"""
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' + m.role) }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_QWEN3_5_TEXT = {**_COMMON, **_LINEAR, "model_type": "qwen3_5_text"}

# Every cache kind: plain KV, sliding window (two ways), recurrent state beside KV (two ways), experts.
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (qwen3, {**_COMMON, "model_type": "qwen3"}),
    "llama": (llama, {**_COMMON, "model_type": "llama"}),
    "gemma3_text": (
        gemma3_text,
        {**_COMMON, "model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2,
         "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000.0},
    ),
    "gpt_oss": (
        gpt_oss,
        {**_COMMON, "model_type": "gpt_oss", "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
         "tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048,
                          "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "qwen3_5": (qwen3_5, {"model_type": "qwen3_5", "text_config": _QWEN3_5_TEXT, "vocab_size": VOCAB}),
    "qwen3_next": (
        qwen3_next,
        {**_COMMON, **_LINEAR, **_EXPERTS, "model_type": "qwen3_next", "shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": (qwen3_moe, {**_COMMON, **_EXPERTS, "model_type": "qwen3_moe"}),
}  # fmt: skip

# Layers with plain and with sliding-window caches, and recurrent layers beside plain ones. A full run adds a model of
# plain caches alone, and does the cases of SAMPLE with every architecture.
KINDS: tuple[str, ...] = (*scaled(("qwen3",), ()), "gemma3_text", "qwen3_5")
SAMPLE: tuple[str, ...] = scaled(tuple(ARCHITECTURES), KINDS)

# Those that mlx-lm computes wrongly, or not at all, in a batch of prompts of unequal length, with the lane that serves
# them: state that padding empties, positions that follow the longest row, an offset that must be one number, and
# caches that no batch can hold.
LANES: dict[str, str] = {"mamba": "equal", "afm7": "single", "gpt_bigcode": "single", "llama4": "single"}
_LANED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (
        mamba,
        {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "state_size": 16,
         "num_hidden_layers": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8,
         "max_position_embeddings": 4096},
    ),
    "afm7": (
        afm7,
        {"model_type": "afm7", "vocab_size": VOCAB, "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2,
         "num_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 4096},
    ),
    "gpt_bigcode": (
        gpt_bigcode,
        {"model_type": "gpt_bigcode", "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_inner": 128, "n_head": 4,
         "n_positions": 4096, "layer_norm_epsilon": 1e-5},
    ),
    "llama4": (
        llama4,
        {"model_type": "llama4", "vocab_size": VOCAB,
         "text_config": {
             **{key: value for key, value in _COMMON.items() if key not in ("tie_word_embeddings", "rope_theta")},
             "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 32, "use_qk_norm": True,
             "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128, "num_experts_per_tok": 1,
             "num_local_experts": 2, "rope_scaling": None, "rope_theta": 10000.0,
         }},
    ),
}  # fmt: skip


# Beside these, one that can be divided among ranks in both ways.
_DIVIDED: dict[str, tuple[Any, dict[str, Any]]] = {"qwen2": (qwen2, {**_COMMON, "model_type": "qwen2"})}


def shallow(architecture: str) -> dict[str, Any]:
    """Overrides for `build`: in `make test` two layers, one of each kind."""
    base = (ARCHITECTURES | _LANED | _DIVIDED)[architecture][1]
    text = base.get("text_config", base)
    # Chunks of llama4 and the reuse of KV of afm7 take four.
    if FULL or architecture in ("llama4", "afm7") or "num_hidden_layers" not in text:
        return {}
    sizes = {"num_hidden_layers": 2, **({"layer_types": text["layer_types"][:2]} if "layer_types" in text else {})}
    return {"text_config": {**text, **sizes}} if "text_config" in base else sizes


def build(architecture: str, folder: Path, *, seed: int = 0, markers: Sequence[str] = (), **overrides: Any) -> Path:
    """A random model of `architecture` with a byte-level tokenizer, in the layout of a Hugging Face repository.

    `markers` become control tokens.
    """
    module, base = (ARCHITECTURES | _LANED | _DIVIDED)[architecture]
    return write(module, base, folder, seed=seed, markers=markers, **overrides)


def write(
    module: Any, base: dict[str, Any], folder: Path, *, seed: int = 0, markers: Sequence[str] = (), **overrides: Any
) -> Path:
    """A random model of a module of mlx-lm; see `build`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(markers)
    overrides = {"vocab_size": max(VOCAB, len(tokenizer)), **overrides}
    tokenizer.save_pretrained(folder)
    config = {**base, "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"), **overrides}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Random initialisation is nearly flat: larger embeddings give logits that greedy decoding can tell apart.
    model.apply(lambda array: array * 1.5 if array.ndim == 2 else array)
    mx.eval(model.parameters())
    save_model(folder, model)
    save_config(config, config_path=folder / "config.json")
    return folder


def tiny_tokenizer(markers: Sequence[str] = (), *, are_special: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `markers` as tokens of their own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokens = [AddedToken(marker, special=are_special, normalized=False) for marker in markers]
    tokenizer.add_tokens(tokens, special_tokens=are_special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _corpus() -> list[str]:
    rng = random.Random(0)
    syllables = ["ka", "to", "mi", "ra", "sen", "lu", "por", "vi", "de", "an"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=12)) for _ in range(200)]


class Breakable:
    """A model whose next forward passes raise, `faults` times, once armed, in these words."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.faults = 0
        self.words = "a step failed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.faults:
            self.faults -= 1
            raise RuntimeError(self.words)
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
