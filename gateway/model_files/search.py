"""Search of the hub for models that MLX can load and that fit this machine. The verdicts are those of `mlxctl info`.

Short list of models, with their sizes, that mlxd recommends without a network.

Sizes in bytes are those that the repositories publish; shapes are those of their config.json.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec
from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from msgspec import Struct, field
from msgspec.structs import replace

from gateway.model_files import hub, metadata
from gateway.model_files.hub import HubFailed
from gateway.model_files.metadata import ModelMetadata, TensorEntry, estimate, measure


class HubEntry(Struct, frozen=True):
    """One repository. `config` has the fields from which the size of the KV is estimated."""

    repository: str
    purpose: str
    disk_bytes: int
    config: dict[str, Any]

    def inspect(self, available_bytes: int) -> ModelMetadata:
        """Estimate the model's memory and whether it fits, as `mlxctl info` does from files."""
        # A ninth of a model with four bits in groups of 64 is scales and biases. They are the floats that a dtype
        # changes.
        floats = self.disk_bytes // 9
        packed = self.disk_bytes - floats
        tensors = (
            TensorEntry("U32", (packed // 4,), (0, packed)),
            TensorEntry("BF16", (floats // 2,), (packed, self.disk_bytes)),
        )
        return estimate(self.repository, self.config, measure(tensors, "auto"), 0, available_bytes)


def _config(model_type: str, layers: int, heads: int, kv_heads: int, width: int, context: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "max_position_embeddings": context,
    }  # fmt: skip


def _hybrid(model_type: str) -> dict[str, Any]:
    """Return the configuration of a model with recurrent and attention layers, for which no KV size is computed."""
    return {"model_type": model_type, "max_position_embeddings": 262144}


def _gpt_oss(layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return _config("gpt_oss", layers, 64, 8, 64, 131072) | {"layer_types": kinds, "sliding_window": 128}


SHORTLIST: Final = (
    HubEntry("mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit", "the most capable here", 141_733_920_768,
          _config("qwen3_moe", 94, 64, 4, 128, 262144)),
    HubEntry("mlx-community/gpt-oss-120b-MXFP4-Q8", "reasoning and tools", 70_652_212_224, _gpt_oss(36)),
    HubEntry("mlx-community/Qwen3.5-122B-A10B-4bit", "general", 69_593_314_272, _hybrid("qwen3_5_moe")),
    HubEntry("mlx-community/Qwen3-Coder-Next-4bit", "coding agents", 45_644_286_500, _hybrid("qwen3_next")),
    HubEntry("mlx-community/Qwen3.6-35B-A3B-4bit", "general, fast", 20_401_929_952, _hybrid("qwen3_5_moe")),
    HubEntry("mlx-community/Qwen3-30B-A3B-4bit", "general, fast", 17_612_931_072,
          _config("qwen3_moe", 48, 32, 4, 128, 40960)),
    HubEntry("mlx-community/Qwen3.6-27B-4bit", "general", 16_054_262_240, _hybrid("qwen3_5")),
    HubEntry("mlx-community/gpt-oss-20b-MXFP4-Q8", "reasoning and tools", 12_025_908_224, _gpt_oss(24)),
    HubEntry("mlx-community/Qwen3.5-9B-4bit", "general", 5_950_062_560, _hybrid("qwen3_5")),
    HubEntry("mlx-community/Qwen3-4B-4bit", "small", 2_278_972_183, _config("qwen3", 36, 32, 8, 128, 40960)),
    HubEntry("mlx-community/Qwen3-0.6B-4bit", "very small, to try things out", 342_884_352,
          _config("qwen3", 28, 16, 8, 128, 40960)),
)  # fmt: skip


DEFAULT_LIMIT: Final = 10
# Repositories of MLX models have this tag.
_TAG: Final = "mlx"
_PUBLISHER: Final = "mlx-community"
# Number of models in one page of the hub's list.
_LISTED_MAX: Final = 100
# Maximum number of models that are inspected to find `limit` usable ones, as a multiple of `limit`.
_JUDGED_MAX: Final = 3
_AT_ONCE: Final = 8
# A recommended model must leave memory for the long prompts of agents.
_TOKENS_MIN: Final = 8192
_WEIGHTS_PART: Final = 0.8


class FoundRepository(Struct, frozen=True):
    """One repository. `downloads` counts last month's downloads; None if the hub was not queried.

    `is_usable` means that the model fits and can be loaded, so `mlxctl info` exits with 0. `reason` explains the
    verdict.
    """

    repository: str
    is_usable: bool
    reason: str
    downloads: int | None = None
    is_downloaded: bool = False
    purpose: str = ""
    # None if the model's memory needs are unknown.
    info: ModelMetadata | None = None


class Recommendation(Struct, frozen=True):
    """Models that this machine can use. `offline` says why the hub was not queried; empty if it was."""

    candidates: list[FoundRepository]
    offline: str = ""


class _HubListing(Struct, frozen=True):
    """An entry of the hub's list of models."""

    repository: str = field(name="id")
    downloads: int | None = None
    config: dict[str, Any] | None = None


def search(words: Sequence[str], available_bytes: int, limit: int = DEFAULT_LIMIT) -> list[FoundRepository]:
    """Find repositories whose names contain all of `words`, the most downloaded first. Raises `HubFailed`.

    The result has up to `limit` usable repositories, and the unusable ones between them with their reasons.
    """
    listed = _list(max(words, key=len, default=""))
    named = [model for model in listed if all(word.lower() in model.repository.lower() for word in words)]
    return _judged(named, available_bytes, limit)


def search_shortlist(words: Sequence[str], available_bytes: int) -> list[FoundRepository]:
    """Search mlxd's own list, without the hub."""
    named = [known for known in SHORTLIST if all(word.lower() in known.repository.lower() for word in words)]
    return [_offline(known, available_bytes) for known in named]


def recommend(available_bytes: int, limit: int = DEFAULT_LIMIT) -> Recommendation:
    """Recommend models for this machine: first mlxd's own list, the largest first, then the hub's most downloaded."""
    try:
        popular = _list("", _PUBLISHER)
    except HubFailed as error:
        own = [_offline(known, available_bytes) for known in SHORTLIST]
        return Recommendation([model for model in own if _is_roomy(model)][:limit], str(error))
    by_name = {model.repository: model for model in popular}
    known = [by_name.get(own.repository, _HubListing(own.repository)) for own in SHORTLIST]
    purposes = {own.repository: own.purpose for own in SHORTLIST}
    own = [replace(model, purpose=purposes[model.repository]) for model in _judge_all(known, available_bytes)]
    chosen = [model for model in own if _is_roomy(model)][:limit]
    if room := limit - len(chosen):
        others = [model for model in popular if model.repository not in purposes]
        chosen += [model for model in _judged(others, available_bytes, room) if _is_roomy(model)][:room]
    return Recommendation(chosen)


def inspect_one(repository: str, available_bytes: int) -> FoundRepository:
    """Inspect one repository by its name."""
    return _judge(_HubListing(repository), available_bytes)


def _list(word: str, author: str = "") -> list[_HubListing]:
    """Fetch the hub's list of MLX models, the most downloaded first. Raises `HubFailed`."""
    # The hub's library is not used here, because it would retry for half a minute without a network.
    parameters = {"filter": _TAG, "sort": "downloads", "limit": str(_LISTED_MAX)}
    parameters |= {name: value for name, value in (("search", word), ("author", author)) if value}
    with hub.translated_errors("the list of models"):
        response = get_session().get(
            f"{constants.ENDPOINT}/api/models",
            params=[*parameters.items(), ("expand", "config"), ("expand", "downloads")],
            headers=build_hf_headers(token=hub.token()),
            timeout=hub.TIMEOUT_S,
        )
        hf_raise_for_status(response)
    try:
        return msgspec.json.decode(response.content, type=list[_HubListing])
    except msgspec.DecodeError as error:
        raise HubFailed(f"the hub's list of models was not understood: {error}") from None


def _judged(listed: Sequence[_HubListing], available_bytes: int, limit: int) -> list[FoundRepository]:
    """Inspect models in order, until `limit` of them are usable or the maximum number was inspected."""
    judged: list[FoundRepository] = []
    for first in range(0, min(len(listed), limit * _JUDGED_MAX), limit):
        judged += _judge_all(listed[first : first + limit], available_bytes)
        if sum(model.is_usable for model in judged) >= limit:
            break
    return judged


def _judge_all(listed: Iterable[_HubListing], available_bytes: int) -> list[FoundRepository]:
    with ThreadPoolExecutor(_AT_ONCE, "judge") as judges:
        return list(judges.map(partial(_judge, available_bytes=available_bytes), listed))


def _judge(listed: _HubListing, available_bytes: int) -> FoundRepository:
    """Inspect a model by its files on this machine, or else by those on the hub."""
    name = listed.repository
    try:
        info = metadata.inspect(metadata.find(name), "auto", 0, available_bytes)
    except metadata.Unreadable:
        # The hub's list includes parts of config.json, which suffice to reject an unsupported architecture.
        known = listed.config or {}
        if "model_type" in known and (reasons := hub.architecture_obstacles(known)):
            return FoundRepository(name, False, f"cannot be loaded: {'; '.join(reasons)}", listed.downloads)
        try:
            repository = hub.fetch_repository(name)
            info = hub.inspect(repository, "auto", 0, available_bytes)
            if info is None:
                reason = "; ".join(hub.obstacles(repository))
                return FoundRepository(name, False, f"cannot be loaded: {reason}", listed.downloads)
        except HubFailed as error:
            return FoundRepository(name, False, str(error), listed.downloads)
    return _candidate(info, name, listed.downloads)


def _candidate(info: ModelMetadata, name: str, downloads: int | None = None) -> FoundRepository:
    reason = f"cannot be loaded: {'; '.join(info.obstacles)}" if info.obstacles else info.verdict
    return FoundRepository(
        repository=name,
        is_usable=info.fits and not info.obstacles,
        reason=reason,
        downloads=downloads,
        is_downloaded=info.is_downloaded,
        info=info,
    )


def _offline(known: HubEntry, available_bytes: int) -> FoundRepository:
    try:
        info = metadata.inspect(metadata.find(known.repository), "auto", 0, available_bytes)
    except metadata.Unreadable:
        obstacles = tuple(hub.architecture_obstacles(known.config))
        info = replace(known.inspect(available_bytes), is_downloaded=False, obstacles=obstacles)
    return replace(_candidate(info, known.repository), purpose=known.purpose)


def _is_roomy(model: FoundRepository) -> bool:
    """Whether a model can be used and leaves memory for long prompts."""
    info = model.info
    if not model.is_usable or info is None or info.weights_bytes > info.available_bytes * _WEIGHTS_PART:
        return False
    return info.tokens_max is None or info.tokens_max >= min(info.context or _TOKENS_MIN, _TOKENS_MIN)
