"""Facts about a model that clients ask for: parameters, size, context, quantization, template."""

import json
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gateway.model_files.metadata import TensorEntry, Unreadable, find, own_context, read_config, read_tensors
from protocol.chat_templates import ADDITIONAL_TEMPLATES, ChatTemplates
from protocol.checkpoint import file_bytes, file_json

# Each prompt format for filling in the middle begins with one of these tokens. Workers know the whole formats.
FILL_MARKS: Final = ("<|fim_prefix|>", "<fim_prefix>", "▁<PRE>", "<｜fim▁begin｜>", "<[fim-suffix]>", "[SUFFIX]")
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_PACKED: Final = "U32"
_PACKED_BITS: Final = 32
_BITS: Final = frozenset({2, 3, 4, 5, 6, 8})


class ModelFacts(Struct, frozen=True):
    """Facts of one model. A fact is None or empty if the files lack it. `bits` is the width of most
    quantized weights.
    """

    architecture: str = ""
    context: int | None = None
    parameters: int | None = None
    size_bytes: int | None = None
    bits: int | None = None
    chat_template: str = ""
    # Template for chats with tools; empty if `chat_template` renders them.
    tool_template: str = ""
    # Whether the vocabulary has tokens for filling in the middle of a text.
    fills_middle: bool = False
    # Modification time of the files in seconds since the epoch; 0 without files.
    modified_s: float = 0.0

    @property
    def templates(self) -> str:
        """Text of all templates in use, which shows what they render."""
        return self.chat_template + self.tool_template


class FactsReader:
    """Reads facts from model folders. The headers of weights are read again only when the folder has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, ModelFacts]] = {}

    def read(self, path: str) -> ModelFacts:
        """Return a model's facts, all None if the model is not on this machine. Blocks while reading files."""
        try:
            folder = find(path)
            stamp = (folder / "config.json").stat().st_mtime_ns
            known = self._known.get(folder)
            if known is not None and known[0] == stamp:
                return known[1]
            facts = replace(_read(folder), modified_s=stamp / 1e9)
        except (Unreadable, OSError):
            return ModelFacts()
        # Facts without a size are not cached, because a download may still add the weights.
        if facts.size_bytes is not None:
            self._known[folder] = (stamp, facts)
        return facts


def _read(folder: Path) -> ModelFacts:
    config = read_config(folder)
    try:
        tensors = read_tensors(folder)
    except Unreadable:
        tensors = {}
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    templates = _templates(folder)
    return ModelFacts(
        str(config.get("model_type", "")),
        own_context(config),
        parameters(tensors, quantization if isinstance(quantization, dict) else {}) if tensors else None,
        sum(end - start for start, end in (tensor.data_offsets for tensor in tensors.values())) if tensors else None,
        bits if isinstance(bits, int) and bits in _BITS else None,
        templates.plain,
        templates.with_tools if templates.with_tools != templates.plain else "",
        _fills_middle(folder),
    )


def parameters(tensors: Mapping[str, TensorEntry], quantization: Mapping[str, Any]) -> int | None:
    """Count the parameters. In MLX's quantized layers, the unpacked ones are counted. None for other packed formats."""
    total = 0
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        is_quantized = f"{layer}.scales" in tensors
        if is_quantized and part in ("scales", "biases"):
            continue
        if is_quantized and part == "weight":
            unpacked = _unpacked(layer, tensor, tensors[f"{layer}.scales"], quantization)
            if unpacked is None:
                return None
            total += unpacked
        elif tensor.dtype in _FLOATS:
            total += prod(tensor.shape)
        else:
            return None
    return total


def _unpacked(layer: str, weight: TensorEntry, scales: TensorEntry, quantization: Mapping[str, Any]) -> int | None:
    own = quantization.get(layer)
    group = (own if isinstance(own, dict) else quantization).get("group_size")
    if weight.dtype != _PACKED or not isinstance(group, int) or not weight.shape or not scales.shape:
        return None
    width = scales.shape[-1] * group
    packed_bits = weight.shape[-1] * _PACKED_BITS
    if width <= 0 or packed_bits % width or packed_bits // width not in _BITS:
        return None
    return prod(scales.shape) * group


def _fills_middle(folder: Path) -> bool:
    """Whether the tokenizer's files contain the first token of a format for filling in the middle."""
    marks = [json.dumps(mark, ensure_ascii=is_ascii).encode() for mark in FILL_MARKS for is_ascii in (True, False)]
    for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            text = file_bytes(folder / name)
        except OSError:
            continue
        if any(mark in text for mark in marks):
            return True
    return False


def _templates(folder: Path) -> ChatTemplates:
    """Return the chat templates, from the files in the tokenizer's own order."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja"))}
    named: dict[str, str] = {}
    for name, file in files.items():
        with suppress(OSError, UnicodeDecodeError):
            named[name] = file_bytes(file).decode()
    if named:
        return ChatTemplates.of(named)
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            content: Any = file_json(folder / name)
        except (OSError, ValueError):
            continue
        templates = ChatTemplates.of(content.get("chat_template") if isinstance(content, dict) else None)
        if templates.texts:
            return templates
    return ChatTemplates()
