"""Memory that a model needs, before it is loaded: from its files' headers and its settings."""

from dataclasses import dataclass
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.model_files.adapter_sizes import adapter_sizes
from gateway.model_files.metadata import ModelMetadata, Unreadable, find, inspect
from gateway.model_files.worker_memory import BUFFER_BYTES, MIB, OVERHEAD_BYTES, fixed_bytes
from protocol.kinds import AUDIO, EMBED, RERANK, SPEAKERS, audio_family
from protocol.timing_profile import LoadFacts
from protocol.transcript import CLIP_BYTES, CLIP_BYTES_LEAST

# A share is comfortable with KV for a sequence of so many tokens, and of no use with less than so many.
COMFORT_TOKENS: Final = 32_768
LEAST_TOKENS: Final = 1024
# Where the KV of an architecture is not computed: a part of the weights, and at least this.
UNKNOWN_KV_PART: Final = 8
UNKNOWN_KV_BYTES: Final = 64 * MIB
# Of models that read, hear or speak, which keep no KV: what one pass computes, at least this and this part of the
# weights, and the most of a loan that they have a use for.
READERS: Final = frozenset({EMBED, RERANK, AUDIO})
PASS_BYTES: Final = 64 * MIB
PASS_PART: Final = 8
PASS_MOST: Final = 2048 * MIB
# The worker gives KV about this part of what its weights leave of its share (worker/model/memory.py).
KV_PART: Final = 0.6


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes. With less than `least` a model is of no use; `floor` is what it gets; more is lent up to `most`."""

    weights: int
    least: int
    floor: int
    most: int

    def within(self, cap: int) -> int:
        """The floor under a cap: less than comfortable is better than nothing."""
        return min(self.floor, max(self.least, cap))


def portion(need: Need, part: float, processes: int) -> Need:
    """Need of so many ranks that have a part of a model together; `need` is that of one process with all of it."""
    process = OVERHEAD_BYTES + BUFFER_BYTES

    def own(count: int) -> int:
        return int(max(0, count - process) * part) + processes * process

    return Need(int(need.weights * part), own(need.least), own(need.floor), own(need.most))


def estimate(model: ModelConfig, lendable: int, load: LoadFacts | None = None) -> Need:
    """Memory that `model` needs; `lendable` is the largest possible loan. Unreadable files: only the overhead.

    `load` is what its newest load has shown: the KV of an architecture that is not computed here, and a process that is
    larger than others.
    """
    info, draft = _info(model, model.path), _info(model, model.draft) if model.draft else None
    weights = 0 if info is None else info.weights_bytes
    weights += 0 if draft is None else draft.weights_bytes
    weights += sum(adapter_sizes(model.adapters).values())
    fixed = fixed_bytes(weights, has_towers=info is not None and bool(info.tower_bytes))
    if load is not None and load.weights_bytes:
        fixed = max(fixed, load.footprint_bytes - load.weights_bytes + weights)
    cache = model.cache.ram_bytes
    if model.memory_bytes != "auto":
        # The operator's word: it is what the worker is told to stay in, whatever we think of it.
        least = max(model.memory_bytes, weights)
        return Need(weights, least, least, least)
    kind = _kind(model, info)
    if kind in READERS:
        least = floor = fixed + max(PASS_BYTES, weights // PASS_PART)
        if kind == AUDIO and _hears(model, info):
            least, floor = least + CLIP_BYTES_LEAST, floor + CLIP_BYTES
        return Need(weights, least, floor, floor + min(lendable, PASS_MOST))
    if model.kv_bytes is not None:
        floor = fixed + model.kv_bytes + (cache or 0)
        return Need(weights, floor, floor, floor if cache is not None else floor + lendable)
    infos = [info, *([draft] if draft is not None else ())]
    floor = fixed + (cache or 0) + sum(_kv_bytes(each, COMFORT_TOKENS, load) for each in infos)
    least = fixed + (cache or 0) + sum(_kv_bytes(each, LEAST_TOKENS, load) for each in infos)
    return Need(weights, least, floor, floor + lendable)


def _info(model: ModelConfig, path: str) -> ModelMetadata | None:
    """The files of a model, or of the one that drafts for it, with its settings."""
    try:
        is_draft = path != model.path
        cache = -1 if model.expert_cache_bytes == "auto" else model.expert_cache_bytes
        return inspect(find(path), model.dtype, model.context, 0, 0 if is_draft else model.kv_bits or 0, cache)
    except (Unreadable, OSError, ValueError, TypeError, KeyError, ArithmeticError):
        # Its worker says what is wrong with it; nothing that is in a file may harm the others.
        return None


def _kind(model: ModelConfig, info: ModelMetadata | None) -> str:
    if model.kind != "auto":
        return model.kind
    return info.kind if info is not None else ""


def _hears(model: ModelConfig, info: ModelMetadata | None) -> bool:
    """Whether a model of audio holds clips. One whose family is not known may."""
    return audio_family({"model_type": info.model_type if info is not None else ""}, model.path) not in SPEAKERS


def _kv_bytes(info: ModelMetadata | None, tokens: int, load: LoadFacts | None) -> int:
    if (info is None or info.kv_1k_bytes is None) and load is not None and load.token_bytes:
        longest = min(tokens, (info.context if info is not None else None) or tokens)
        return int((load.token_bytes * longest + load.row_bytes) / KV_PART)
    if info is None or info.kv_1k_bytes is None:
        return max(UNKNOWN_KV_BYTES, (info.weights_bytes if info else 0) // UNKNOWN_KV_PART)
    longest = min(tokens, info.context or tokens)
    return int((info.kv_1k_bytes * longest // 1000 + info.kv_window_bytes) / KV_PART)
