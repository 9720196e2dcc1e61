"""Search of the hub for models that MLX can load and that fit this machine. The verdicts are those of `mlxctl info`."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec
from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from msgspec import Struct, field
from msgspec.structs import replace

from gateway.model_files import hub, metadata, support
from gateway.model_files.hub import HubFailed
from gateway.model_files.metadata import ModelMetadata
from gateway.model_files.shortlist import SHORTLIST, HubEntry

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
        if "model_type" in known and (reasons := support.architecture_obstacles(known)):
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
        obstacles = tuple(support.architecture_obstacles(known.config))
        info = replace(known.inspect(available_bytes), is_downloaded=False, obstacles=obstacles)
    return replace(_candidate(info, known.repository), purpose=known.purpose)


def _is_roomy(model: FoundRepository) -> bool:
    """Whether a model can be used and leaves memory for long prompts."""
    info = model.info
    if not model.is_usable or info is None or info.weights_bytes > info.available_bytes * _WEIGHTS_PART:
        return False
    return info.tokens_max is None or info.tokens_max >= min(info.context or _TOKENS_MIN, _TOKENS_MIN)
