"""Estimate of a model's memory before it is loaded, from its files' headers and its settings."""

from dataclasses import dataclass
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.model_files.known_times import BUFFER_BYTES, MIB, OVERHEAD_BYTES, fixed_bytes
from gateway.model_files.metadata import ModelMetadata, Unreadable, adapter_sizes, find, inspect
from protocol.checkpoint import AUDIO, EMBED, RERANK, SPEAKERS, audio_family
from protocol.from_worker import MAX_CLIP_BYTES, MIN_CLIP_BYTES
from protocol.timing_profile import LoadFacts

# A model's usual grant has KV for a context of COMFORT_TOKENS. A grant for less than LEAST_TOKENS is not made, because
# such a model is of no use.
COMFORT_TOKENS: Final = 32_768
LEAST_TOKENS: Final = 1024
# Used if the size of a model's KV cannot be computed: it is estimated as the weights divided by UNKNOWN_KV_DIVISOR, and
# at least UNKNOWN_KV_BYTES.
UNKNOWN_KV_DIVISOR: Final = 8
UNKNOWN_KV_BYTES: Final = 64 * MIB
# Kinds of models without KV. A forward pass of such a model is assumed to take the weights divided by PASS_DIVISOR, and
# at least PASS_BYTES. Loans above PASS_LOAN_MAX would not be used.
KINDS_WITHOUT_KV: Final = frozenset({EMBED, RERANK, AUDIO})
PASS_BYTES: Final = 64 * MIB
PASS_DIVISOR: Final = 8
PASS_LOAN_MAX: Final = 2048 * MIB
# The worker uses this fraction of its memory besides the weights for KV (worker/model/memory.py).
KV_PART: Final = 0.6


@dataclass(frozen=True, slots=True)
class Need:
    """Memory need of a model in bytes: `least` is the minimum, `floor` the usual grant, `most` the limit including a
    loan."""

    weights: int
    least: int
    floor: int
    most: int


def portion(need: Need, part: float, processes: int) -> Need:
    """Return the need of `processes` ranks that hold the fraction `part` of a model.

    `need` is the need of the whole model in one process.
    """
    process = OVERHEAD_BYTES + BUFFER_BYTES

    def own(count: int) -> int:
        return int(max(0, count - process) * part) + processes * process

    return Need(int(need.weights * part), own(need.least), own(need.floor), own(need.most))


def estimate(model: ModelConfig, loan_max: int, load: LoadFacts | None = None) -> Need:
    """Estimate the memory that `model` needs; `loan_max` is the largest possible loan. Unreadable files count as empty.

    `load` has measurements of the model's newest load. They are used for KV that cannot be computed from the files, and
    if the process was larger than estimated.
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
        # The worker keeps to the operator's setting, so the estimate does not matter.
        least = max(model.memory_bytes, weights)
        return Need(weights, least, least, least)
    kind = _kind(model, info)
    if kind in KINDS_WITHOUT_KV:
        least = floor = fixed + max(PASS_BYTES, weights // PASS_DIVISOR)
        if kind == AUDIO and _transcribes(model, info):
            least, floor = least + MIN_CLIP_BYTES, floor + MAX_CLIP_BYTES
        return Need(weights, least, floor, floor + min(loan_max, PASS_LOAN_MAX))
    if model.kv_bytes is not None:
        floor = fixed + model.kv_bytes + (cache or 0)
        return Need(weights, floor, floor, floor if cache is not None else floor + loan_max)
    infos = [info, *([draft] if draft is not None else ())]
    floor = fixed + (cache or 0) + sum(_kv_bytes(each, COMFORT_TOKENS, load) for each in infos)
    least = fixed + (cache or 0) + sum(_kv_bytes(each, LEAST_TOKENS, load) for each in infos)
    return Need(weights, least, floor, floor + loan_max)


def _info(model: ModelConfig, path: str) -> ModelMetadata | None:
    """Read the metadata of a model or of its draft model; None if the files cannot be read."""
    try:
        is_draft = path != model.path
        return inspect(find(path), model.dtype, model.context, 0, 0 if is_draft else model.kv_bits or 0)
    except (Unreadable, OSError, ValueError, TypeError, KeyError, ArithmeticError):
        # The model's worker will report the unreadable files. Other models must not be affected.
        return None


def _kind(model: ModelConfig, info: ModelMetadata | None) -> str:
    if model.kind != "auto":
        return model.kind
    return info.kind if info is not None else ""


def _transcribes(model: ModelConfig, info: ModelMetadata | None) -> bool:
    """Whether an audio model may transcribe, which needs memory for clips. A model of an unknown family counts as one
    that may.
    """
    return audio_family({"model_type": info.model_type if info is not None else ""}, model.path) not in SPEAKERS


def _kv_bytes(info: ModelMetadata | None, tokens: int, load: LoadFacts | None) -> int:
    if (info is None or info.kv_1k_bytes is None) and load is not None and load.token_bytes:
        longest = min(tokens, (info.context if info is not None else None) or tokens)
        return int((load.token_bytes * longest + load.row_bytes) / KV_PART)
    if info is None or info.kv_1k_bytes is None:
        return max(UNKNOWN_KV_BYTES, (info.weights_bytes if info else 0) // UNKNOWN_KV_DIVISOR)
    longest = min(tokens, info.context or tokens)
    return int((info.kv_1k_bytes * longest // 1000 + info.kv_window_bytes) / KV_PART)
