"""Size and shape of a model, read from its files without MLX and without reading weights.

Models on this machine, configured or only downloaded, with their needs and whether they would fit.

Facts about a model that clients ask for: parameters, size, context, quantization, template.
"""

import importlib.metadata
import importlib.util
import json
import struct
import sys
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.control_types import Speeds
from gateway.model_files.hub_cache import cached_models, folder_of
from gateway.model_files.known_times import fixed_bytes
from protocol.checkpoint import (
    ADDITIONAL_TEMPLATES,
    AUDIO_SECTIONS,
    TEXT,
    VISION_SECTIONS,
    ChatTemplates,
    audio_family,
    context_of,
    file_bytes,
    file_json,
    group_of,
    has_section,
    is_head,
    is_tower,
    kind_of,
    number_bits,
    obstacle,
    unused,
)
from protocol.model_files import UnusableWeights, check_tensors, has_index, read_index, weight_files

# A head for multi-token prediction may have its weights in this separate file.
HEAD: Final = "mtp.safetensors"
METADATA: Final = "__metadata__"
# These models come with mlxd, in folders of the worker's package.
DEMOS: Final = {"demo": "demo_model", "demo-vision": "demo_vision"}
# The demo model's adapter has a folder in the worker's package too.
DEMO_ADAPTER: Final = "demo-adapter"
_BUILT_IN: Final = DEMOS | {DEMO_ADAPTER: "demo_adapter"}
_ADAPTER_FILES: Final = ("adapters.safetensors", "adapter_model.safetensors")
# MAX_HEADER_SIZE of huggingface/safetensors, safetensors/src/tensor.rs, which the worker's loader applies too.
_HEADER_BYTES_MAX: Final = 100_000_000
# A head of at most so many numbers loses much with KV in 4 bits.
_SMALL_HEAD: Final = 64
_FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Unreadable(Exception):
    """A model's files cannot be read; the message gives the operator the reason."""


class TensorEntry(Struct, frozen=True):
    """An entry of a safetensors header; `is_tower` and `is_head` follow from the tensor's name."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    is_tower: bool = False
    is_head: bool = False


class Weights(Struct, frozen=True):
    """Sizes of all weight files. `loaded_bytes` is the size in memory, `number_bytes` the size of one number of the KV
    cache.

    `has_head` is set if there is a head for multi-token prediction.
    """

    disk_bytes: int
    loaded_bytes: int
    number_bytes: int
    tower_bytes: int = 0
    has_head: bool = False


class Attention(Struct, frozen=True):
    """KV bytes of one sequence: `token_bytes` per token, and in addition `window_bytes` once all sliding windows are
    full.
    """

    token_bytes: int
    window_bytes: int = 0

    def tokens(self, budget: int) -> int | None:
        """Return how many tokens fit into `budget` bytes; None if tokens take no memory."""
        return max(0, budget - self.window_bytes) // self.token_bytes if self.token_bytes else None


class ModelMetadata(Struct, frozen=True):
    """Output of `mlxctl info`. `kv_1k_bytes` is None if it is unknown how to compute the KV of this attention, and for
    models of a kind without KV.
    """

    path: str
    model_type: str
    disk_bytes: int
    weights_bytes: int
    kv_1k_bytes: int | None
    context: int | None
    available_bytes: int
    # Maximum tokens of one sequence that may use half of the memory that the weights leave.
    tokens_max: int | None
    fits: bool
    verdict: str
    is_downloaded: bool = True
    # Reasons why the model cannot be loaded even with enough memory.
    obstacles: tuple[str, ...] = ()
    # KV bytes of one sequence's sliding windows when full. They are additional to the KV that grows with each token.
    kv_window_bytes: int = 0
    # `modalities` other than text for which the files have towers; `tower_bytes` is a part of `weights_bytes`.
    modalities: tuple[str, ...] = ()
    tower_bytes: int = 0
    # `kind` is one of `protocol.checkpoint`; `family` is that of an audio model.
    kind: str = ""
    family: str = ""
    # `head` describes the head for multi-token prediction: `run`, the reason why it is not run, or empty without a
    # head.
    head: str = ""
    # Speeds that workers have measured on this machine.
    measured: Speeds | None = None
    # Bits per number of the quantized KV cache; 0 means that it is not quantized. `kv_warning` is what they cost, where
    # that is more than a little.
    kv_bits: int = 0
    kv_warning: str = ""
    # Experts on disk: `expert_cache_bytes` is their cache's part of `weights_bytes`, `expert_bytes` their part of
    # `disk_bytes`.
    expert_cache_bytes: int = 0
    expert_bytes: int = 0
    # Size of each adapter's file in bytes, by the adapter's name; 0 if the file is missing.
    adapters: dict[str, int] = {}
    # Experimental features that the model is configured to use, each with its reason.
    experimental: tuple[str, ...] = ()


def find(path: str) -> Path:
    """Return the folder of a model or an adapter. Raises `Unreadable`."""
    if path in _BUILT_IN:
        spec = importlib.util.find_spec("worker")
        if spec is None or spec.origin is None:
            raise Unreadable("the demo model is not installed")
        return Path(spec.origin).parent / _BUILT_IN[path]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute():
        raise Unreadable(f"{path} is not a folder")
    repository = folder_of(path)
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        raise Unreadable(
            f"{path} is neither a folder nor in the local Hugging Face cache; download it with: mlxctl pull {path}"
        ) from None
    return repository / "snapshots" / revision


def adapter_sizes(paths: Mapping[str, str]) -> dict[str, int]:
    """Return the size of each adapter's file in bytes, by the adapter's name; 0 if the file is missing."""
    return {name: _adapter_size(path) for name, path in paths.items()}


def _adapter_size(path: str) -> int:
    with suppress(Unreadable, OSError, ValueError):
        folder = find(path)
        return next((file.stat().st_size for name in _ADAPTER_FILES if (file := folder / name).is_file()), 0)
    return 0


def kind_of_files(path: str) -> str:
    """Return the kind of a model as its files show it; empty if they cannot be read."""
    try:
        folder = find(path)
        return kind_of(read_config(folder), {file.name for file in folder.iterdir()}, path)
    except (Unreadable, OSError):
        return ""


def inspect(folder: Path, dtype: str, context: int, available_bytes: int, kv_bits: int = 0) -> ModelMetadata:
    """Inspect a model's folder. The other arguments are the model's settings and the free memory. Raises
    `Unreadable`.
    """
    config, weights = read_config(folder), read_weights(folder, dtype)
    context = min(filter(None, (context, _longest_input(folder))), default=0)
    files = [file.name for file in folder.iterdir()]
    if not has_index(folder):
        return estimate(str(folder), config, weights, context, available_bytes, files, kv_bits)
    try:
        index = read_index(folder)
    except ValueError as error:
        raise Unreadable(str(error)) from None
    held, total = index.cache_bytes(), index.total_bytes
    weights = replace(weights, disk_bytes=weights.disk_bytes + total, loaded_bytes=weights.loaded_bytes + held)
    info = estimate(str(folder), config, weights, context, available_bytes, files, kv_bits)
    return replace(info, expert_cache_bytes=held, expert_bytes=total)


def estimate(
    path: str,
    config: dict[str, Any],
    weights: Weights,
    context: int,
    available_bytes: int,
    files: Container[str] = (),
    kv_bits: int = 0,
) -> ModelMetadata:
    """Estimate a model's memory from its configuration and weights. `files` are the names of the files beside
    config.json.
    """
    kind = kind_of(config, files, path)
    kv = attention(config, weights.number_bytes, kv_bits) if kind == TEXT else None
    own = own_context(config)
    longest = min(own, context) if own and context else own or context or None
    fixed = fixed_bytes(weights.loaded_bytes, has_towers=bool(weights.tower_bytes))
    left = available_bytes - fixed
    tokens = kv.tokens(left // 2) if kv and left > 0 else None
    fits, verdict = _judge(fixed, available_bytes, tokens, longest, has_kv=kind == TEXT)
    return ModelMetadata(
        path=path,
        model_type=str(config.get("model_type", "")),
        disk_bytes=weights.disk_bytes,
        weights_bytes=weights.loaded_bytes,
        kv_1k_bytes=None if kv is None else kv.token_bytes * 1000,
        context=longest,
        available_bytes=available_bytes,
        tokens_max=tokens,
        fits=fits,
        verdict=verdict,
        kv_window_bytes=0 if kv is None else kv.window_bytes,
        modalities=declared_modalities(config),
        tower_bytes=weights.tower_bytes,
        kind=kind,
        family=audio_family(config, path),
        kv_bits=kv_bits,
        kv_warning=_kv_warning(config, kv_bits),
        obstacles=_kv_obstacles(config, kv_bits),
        head=_head(config, weights, files),
    )


def _head(config: dict[str, Any], weights: Weights, files: Container[str]) -> str:
    """Return the value of `ModelMetadata.head`. A head in a separate file runs with any model."""
    if not weights.has_head:
        return ""
    return (HEAD not in files and unused(str(config.get("model_type", "")))) or "run"


def declared_modalities(config: dict[str, Any]) -> tuple[str, ...]:
    """List the modalities other than text for which a configuration declares towers. A loaded model may
    support fewer.
    """
    seen = ("image", "video") if has_section(config, VISION_SECTIONS) else ()
    return (*seen, "audio") if has_section(config, AUDIO_SECTIONS) else seen


def read_weights(folder: Path, dtype: str) -> Weights:
    """Measure the weights, including a separate head file, by reading only headers. Raises `Unreadable`."""
    head = folder / HEAD
    return measure([*read_tensors(folder).values(), *(_header(head).values() if head.exists() else ())], dtype)


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Read the headers of a model's weight files, and return the entry of each tensor by name. Raises `Unreadable`."""
    try:
        headers = {file.name: _header(file) for file in weight_files(folder)}
        check_tensors(folder, headers)
    except UnusableWeights as error:
        raise Unreadable(str(error)) from None
    return {name: tensor for header in headers.values() for name, tensor in header.items()}


def measure(tensors: Iterable[TensorEntry], dtype: str) -> Weights:
    """Sum up the sizes of all tensors of a model."""
    target = _target(dtype)
    disk = loaded = tower = 0
    has_head = False
    floats: Counter[str] = Counter()
    for tensor in tensors:
        nbytes = tensor.data_offsets[1] - tensor.data_offsets[0]
        disk += nbytes
        if own := _FLOAT_BYTES.get(tensor.dtype):
            kept = target or tensor.dtype
            floats[kept] += 1
            nbytes = nbytes // own * _FLOAT_BYTES[kept]
        loaded += nbytes
        tower += nbytes if tensor.is_tower else 0
        has_head |= tensor.is_head
    number = _FLOAT_BYTES[floats.most_common(1)[0][0]] if floats else 2
    return Weights(disk, loaded, number, tower, has_head)


def attention(config: dict[str, Any], number_bytes: int, kv_bits: int = 0) -> Attention | None:
    """Compute the KV bytes of a sequence; None for a type of attention that is not known here.

    Full attention grows with each token; a sliding window stops growing when it is full. Only layers that grow are
    quantized.
    """
    text = _text(config)
    layers, heads = _first(text, ("num_hidden_layers", "n_layer")), _first(text, ("num_attention_heads", "n_head"))
    if not layers or not heads or "kv_lora_rank" in text:
        return None
    width = _head_width(text)
    numbers = 2 * (_first(text, ("num_key_value_heads",)) or heads) * width
    each = whole = numbers * number_bytes
    if kv_bits and (group := group_of(width)):
        whole = int(numbers * number_bits(kv_bits, group, number_bytes) / 8)
    kinds: list[str] = text.get("layer_types") or []
    window = _first(text, ("sliding_window",))
    if not kinds and window and (pattern := _window_pattern(text)):
        kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
    if not kinds:
        # A window without a list of layers may apply to all layers, to some, or to none.
        if window and text.get("use_sliding_window") is not False:
            return None
        return Attention(layers * whole)
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return Attention(kinds.count("full_attention") * whole, kinds.count("sliding_attention") * each * (window or 0))


def _head_width(text: dict[str, Any]) -> int:
    heads = _first(text, ("num_attention_heads", "n_head"))
    own = _first(text, ("head_dim",))
    return own or ((_first(text, ("hidden_size", "n_embd")) or 0) // heads if heads else 0)


def _window_pattern(text: Mapping[str, Any]) -> int:
    """Return after how many layers one has full attention instead of a sliding window; 0 if there is no such rule.

    Gemma 3 leaves out the usual number.
    """
    pattern = text.get("sliding_window_pattern", 6 if str(text.get("model_type")).startswith("gemma3") else 0)
    return pattern if isinstance(pattern, int) else 0


def _longest_input(folder: Path) -> int:
    """Return the longest input of a sentence-transformers model; 0 if its files declare none."""
    with suppress(OSError, ValueError):
        settings = file_json(folder / "sentence_bert_config.json")
        longest = settings.get("max_seq_length") if isinstance(settings, dict) else None
        return longest if isinstance(longest, int) else 0
    return 0


def _kv_warning(config: dict[str, Any], kv_bits: int) -> str:
    """Return what quantized KV costs a model whose heads are small: few numbers share one scale."""
    width = _head_width(_text(config))
    if kv_bits != 4 or not width or width > _SMALL_HEAD:
        return ""
    return (
        f"4 bits cost a model with heads of 64 numbers 15 to 20 % of perplexity, 8 bits 0.2 %; its heads have {width}"
    )


def _kv_obstacles(config: dict[str, Any], kv_bits: int) -> tuple[str, ...]:
    why = obstacle(config, kv_bits) if kv_bits else ""
    return (f"kv_bits = {kv_bits}: {why}",) if why else ()


def _judge(fixed: int, available: int, tokens: int | None, context: int | None, *, has_kv: bool) -> tuple[bool, str]:
    if fixed > available:
        needed = f"{_gib(fixed)}{' without KV' if has_kv else ''}"
        return False, f"does not fit: its worker needs {needed}, and {_gib(available)} are available"
    if not has_kv:
        return True, f"fits: its worker needs {_gib(fixed)}"
    if tokens is None:
        return True, f"its weights fit; {_gib(available - fixed)} are left for KV"
    if tokens == 0:
        return False, "does not fit: nothing is left for KV beside its weights"
    if context is None or tokens < context:
        return True, f"fits, with up to {tokens} tokens at once"
    return True, f"fits, with {tokens // context} sequences of the whole context of {context} tokens"


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"


def _target(dtype: str) -> str | None:
    """Return the dtype in which floats are loaded; None keeps the file's dtype. MLX on a CPU computes in float32."""
    if dtype == "auto":
        return "F32" if sys.platform != "darwin" and not _has_cuda() else None
    return _DTYPES[dtype]


def _has_cuda() -> bool:
    names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    return any(name.lower().startswith("mlx-cuda") for name in names)


def _header(file: Path) -> dict[str, TensorEntry]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size - 8:
                raise Unreadable(f"{file} is truncated, or no safetensors file")
            if length > _HEADER_BYTES_MAX:
                limit = f"{length} bytes, more than the {_HEADER_BYTES_MAX} that the format allows"
                raise Unreadable(f"{file} has a safetensors header of {limit}")
            header: dict[str, msgspec.Raw] = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        tensors = {
            name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in header.items() if name != METADATA
        }
    except (OSError, struct.error, msgspec.DecodeError) as error:
        raise Unreadable(f"{file} cannot be read: {error}") from None
    return {name: _classified(name, tensor) for name, tensor in tensors.items()}


def _classified(name: str, tensor: TensorEntry) -> TensorEntry:
    tower, head = is_tower(name), is_head(name)
    return replace(tensor, is_tower=tower, is_head=head) if tower or head else tensor


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises `Unreadable`."""
    try:
        content = file_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise Unreadable(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{folder / 'config.json'} is not a JSON object")
    return content


def own_context(config: dict[str, Any]) -> int | None:
    """Return the context length that the model's configuration states, if any."""
    named = context_of(config)
    return int(named[1]) if named and isinstance(named[1], int | float) and named[1] >= 1 else None


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a configuration."""
    inner = config.get("text_config")
    return config | inner if isinstance(inner, dict) else config


def _first(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        if isinstance(value := _text(config).get(key), int) and value > 0:
            return value
    return None


NOT_CONFIGURED = "not configured"


class ListedModel(Struct, frozen=True):
    """One listed model. `state` is `stopped` if no daemon runs, and `not configured` if the model is only
    in the cache.
    """

    name: str
    aliases: tuple[str, ...]
    path: str
    state: str
    size_bytes: int
    memory_bytes: int
    context: int
    fits: bool | None
    verdict: str


class ConfiguredModel(Struct, frozen=True):
    """The settings of a configured model that the listing uses."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    dtype: str = "auto"
    context: int = 0
    state: str = "stopped"
    is_loaded: bool = False


def list_models(known: list[ConfiguredModel], available_bytes: int) -> list[ListedModel]:
    """List the known models, then those that are only in the cache. Blocks while reading files."""
    paths = {model.path for model in known}
    more = (ConfiguredModel(name, name, state=NOT_CONFIGURED) for name in cached_models() if name not in paths)
    return [_listed(model, available_bytes) for model in (*known, *more)]


def _listed(model: ConfiguredModel, available_bytes: int) -> ListedModel:
    head = (model.name, model.aliases, model.path, model.state)
    try:
        info = inspect(find(model.path), model.dtype, model.context, available_bytes)
    except Unreadable as error:
        return ListedModel(*head, 0, 0, model.context, None, str(error))
    fits, verdict = (True, "is loaded") if model.is_loaded else (info.fits, info.verdict)
    return ListedModel(*head, info.disk_bytes, info.weights_bytes, info.context or 0, fits, verdict)


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
