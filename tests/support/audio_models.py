"""Tiny random models that hear or speak, in the layout of a Hugging Face repository with the names of mlx-audio."""

import json
import math
import wave
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperTokenizerFast

from tests.support.models import tiny_tokenizer

# As in every multilingual Whisper.
_END: Final = 50257
_VOCAB: Final = 51865
_TIMES: Final = 1501
# Few positions of the text, so that a window that never ends is short.
POSITIONS: Final = 32


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> bytes:
    """A WAV file of a tone that grows and fades."""
    at = np.arange(int(seconds * rate)) / rate
    samples = 0.4 * np.sin(2 * math.pi * hertz * at) * (0.6 + 0.4 * np.sin(2 * math.pi * 0.7 * at))
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return out.getvalue()


def build_whisper(folder: Path, *, sureness: float = 3.0, seed: int = 0) -> Path:
    """A Whisper that knows all languages and times, and of text some letters."""
    from mlx_audio.stt.models.whisper import Model, ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "whisper", "num_mel_bins": 80, "max_source_positions": 1500, "d_model": 32,
        "encoder_attention_heads": 2, "encoder_layers": 1, "decoder_attention_heads": 2, "decoder_layers": 2,
        "vocab_size": _VOCAB, "max_target_positions": POSITIONS,
    }  # fmt: skip
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(config), dtype=mx.float32)
    # By default so sure of itself that hardly a window is decoded twice.
    rows = mx.random.normal((_VOCAB, 32)) * sureness
    ids = mx.arange(_VOCAB)
    # Of text only some letters are known, and of marks the end and the times: what lies between is never the best.
    known = (ids < 64) | (ids == _END) | (ids >= _VOCAB - _TIMES)
    # Times are less likely than text, of which there are fewer tokens.
    rows = mx.where((ids >= _VOCAB - _TIMES)[:, None], rows * 0.4, rows)
    model.decoder.token_embedding.weight = mx.where(known[:, None], rows, 0)
    model.decoder.positional_embedding = mx.random.normal((POSITIONS, 32)) * 2
    for block in model.decoder.blocks:
        # What is heard counts.
        block.cross_attn.out.weight = block.cross_attn.out.weight * 8
    _save(folder, config, model)
    _whisper_tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def _whisper_tokenizer() -> PreTrainedTokenizerFast:
    from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES

    marks = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in list(LANGUAGES)[:99])]
    marks += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    times = [f"<|{at * 0.02:.2f}|>" for at in range(_TIMES)]
    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {mark: _END + at for at, mark in enumerate([*marks, *times])}
    assert max(vocabulary.values()) == _VOCAB - 1
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(marks)
    bpe.add_tokens(times)
    end = "<|endoftext|>"
    return WhisperTokenizerFast(tokenizer_object=bpe, unk_token=end, bos_token=end, eos_token=end)


def build_moonshine(folder: Path, *, seed: int = 0) -> Path:
    from mlx_audio.stt.models.moonshine.moonshine import Model, ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config = {
        "model_type": "moonshine", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1, "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2, "decoder_start_token_id": 300, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(config))
    model.decoder.embed_tokens.weight = model.decoder.embed_tokens.weight * 20
    _save(folder, config, model, conv=True)
    tokenizer.save_pretrained(folder)
    return folder


def build_qwen_asr(folder: Path, *, seed: int = 0) -> Path:
    from mlx_audio.stt.models.qwen3_asr.qwen3_asr import Model, ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(["<|audio_start|>", "<|audio_pad|>", "<|audio_end|>", "<asr_text>"])
    start, pad, end = tokenizer.convert_tokens_to_ids(["<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"])
    config = {
        "model_type": "qwen3_asr", "audio_token_id": pad, "audio_start_token_id": start, "audio_end_token_id": end,
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
            "d_model": 32, "output_dim": 32, "downsample_hidden_size": 8,
        },
        "text_config": {
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 10000.0,
        },
        "support_languages": ["English", "German"],
    }  # fmt: skip
    mx.random.seed(seed)
    _save(folder, config, Model(ModelConfig.from_dict(config)))
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    return folder


def build_parakeet(folder: Path, *, seed: int = 0) -> Path:
    from mlx_audio.stt.models.parakeet.parakeet import Model, ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    words = ["\u2581ka", "to", "\u2581mi", "ra", ".", "\u2581sen"]
    config = {
        "target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel",
        "model_defaults": {"tdt_durations": [0, 1, 2, 3, 4]},
        "preprocessor": {
            "sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01,
            "window": "hann", "features": 16, "n_fft": 512, "dither": 0.0,
        },
        "encoder": {
            "feat_in": 16, "n_layers": 1, "d_model": 32, "n_heads": 2, "ff_expansion_factor": 2,
            "subsampling_factor": 8, "self_attention_model": "rel_pos", "subsampling": "dw_striding",
            "conv_kernel_size": 9, "subsampling_conv_channels": 8, "pos_emb_max_len": 5000,
        },
        "decoder": {
            "blank_as_pad": True, "vocab_size": len(words), "prednet": {"pred_hidden": 16, "pred_rnn_layers": 1},
        },
        "joint": {
            "num_classes": len(words), "vocabulary": words, "num_extra_outputs": 5,
            "jointnet": {"joint_hidden": 16, "activation": "relu", "encoder_hidden": 32, "pred_hidden": 16},
        },
        "decoding": {"model_type": "tdt", "durations": [0, 1, 2, 3, 4], "greedy": {"max_symbols": 4}},
    }  # fmt: skip
    mx.random.seed(seed)
    _save(folder, config, Model(ModelConfig.from_dict(config)))
    return folder


def build_soprano(folder: Path, *, seed: int = 0) -> Path:
    """Its decoder has the size that the library gives every Soprano but 1.1. No sentence ends before its last token."""
    from mlx_audio.tts.models.soprano import Model, ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(["[STOP]", "[TEXT]", "[START]"])
    config: dict[str, Any] = {
        "model_type": "soprano", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": len(tokenizer), "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(config | {"model_path": str(folder)}))
    _save(folder, config, model)
    tokenizer.save_pretrained(folder)
    return folder


def build_qwen_tts(folder: Path, *, design: bool = False, seed: int = 0) -> Path:
    """A model with two voices, or one whose voice is described. No sentence ends before its last token."""
    from mlx_audio.tts.models.qwen3_tts.config import (
        Qwen3TTSTokenizerConfig,
        Qwen3TTSTokenizerDecoderConfig,
        filter_dict_for_dataclass,
    )
    from mlx_audio.tts.models.qwen3_tts.qwen3_tts import Model, ModelConfig
    from mlx_audio.tts.models.qwen3_tts.speech_tokenizer import Qwen3TTSSpeechTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(["<tts_pad>", "<tts_bos>", "<tts_eos>"])
    pad, bos, eos = tokenizer.convert_tokens_to_ids(["<tts_pad>", "<tts_bos>", "<tts_eos>"])
    layers = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    talker = {
        **layers, "vocab_size": 1100, "text_hidden_size": 32, "text_vocab_size": len(tokenizer), "num_code_groups": 2,
        "codec_eos_token_id": 1090, "codec_think_id": 1091, "codec_nothink_id": 1092, "codec_think_bos_id": 1093,
        "codec_think_eos_id": 1094, "codec_pad_id": 1095, "codec_bos_id": 1096, "codec_language_id": {"english": 1097},
        "spk_id": {} if design else {"vivian": 1098, "ryan": 1099}, "spk_is_dialect": {"vivian": False, "ryan": False},
        "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        "code_predictor_config": {**layers, "vocab_size": 76, "num_code_groups": 2},
    }  # fmt: skip
    config = {
        "model_type": "qwen3_tts", "tts_model_type": "voice_design" if design else "custom_voice",
        "tts_model_size": "1b7", "talker_config": talker, "tts_pad_token_id": pad, "tts_bos_token_id": bos,
        "tts_eos_token_id": eos, "sample_rate": 400,
    }  # fmt: skip
    mx.random.seed(seed)
    model = Model(ModelConfig.from_dict(config))
    # Its end is the least likely of all.
    head = model.talker.codec_head.weight
    model.talker.codec_head.weight = mx.where(mx.arange(head.shape[0])[:, None] == 1090, 0, head)
    _save(folder, config, model)
    tokenizer.save_pretrained(folder)
    # The library tells the layout of a weight by its sizes, which therefore are not smaller.
    decoder = {
        "latent_dim": 32, "codebook_dim": 256, "codebook_size": 128, "decoder_dim": 256, "hidden_size": 32,
        "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "num_quantizers": 2, "semantic_codebook_size": 128,
        "vector_quantization_hidden_dimension": 256, "upsample_rates": [8],
    }  # fmt: skip
    known = filter_dict_for_dataclass(Qwen3TTSTokenizerDecoderConfig, decoder)
    codec = Qwen3TTSSpeechTokenizer(Qwen3TTSTokenizerConfig(decoder_config=Qwen3TTSTokenizerDecoderConfig(**known)))
    (folder / "speech_tokenizer").mkdir(exist_ok=True)
    _save(folder / "speech_tokenizer", {"decoder_config": decoder, "decode_upsample_rate": 32}, codec)
    return folder


def _save(folder: Path, config: dict[str, Any], model: Any, *, conv: bool = False) -> None:
    weights = dict(tree_flatten(model.parameters()))
    if conv:
        # As torch has it, which the library turns.
        weights = {
            name: value.transpose(0, 2, 1) if "conv" in name and value.ndim == 3 else value
            for name, value in weights.items()
        }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
