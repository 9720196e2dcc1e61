"""Lists of models as in LM Studio: `GET /api/v0/models` and `GET /api/v1/models`."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.http.exchange import send_body
from gateway.request.record import record_of
from protocol.kinds import AUDIO, EMBED, RERANK


class ModelV0(Struct, frozen=True):
    """One model. Unknown fields are left out."""

    id: str
    type: Literal["llm", "vlm", "embeddings"]
    state: Literal["loaded", "not-loaded"]
    capabilities: tuple[str, ...]
    object: str = "model"
    compatibility_type: str = "mlx"
    publisher: str | UnsetType = UNSET
    arch: str | UnsetType = UNSET
    quantization: str | UnsetType = UNSET
    max_context_length: int | UnsetType = UNSET
    loaded_context_length: int | UnsetType = UNSET


class ModelsV0(Struct, frozen=True):
    """All models that the key may use."""

    data: list[ModelV0]
    object: str = "list"


class Quantization(Struct, frozen=True):
    """Quantization of the majority of the weights."""

    name: str
    bits_per_weight: int


class InstanceConfig(Struct, frozen=True):
    """Settings of a loaded model."""

    context_length: int


class Instance(Struct, frozen=True):
    """A loaded model; its id is the model's."""

    id: str
    config: InstanceConfig


class Capabilities(Struct, frozen=True):
    """Abilities of a model, as its worker reports them or as its files show them."""

    vision: bool
    trained_for_tool_use: bool


class ModelV1(Struct, frozen=True):
    """One model. Requests name it by its `key`."""

    key: str
    display_name: str
    loaded_instances: list[Instance]
    capabilities: Capabilities
    type: Literal["llm", "embedding"] = "llm"
    format: str = "mlx"
    quantization: Quantization | None = None
    publisher: str | UnsetType = UNSET
    architecture: str | UnsetType = UNSET
    size_bytes: int | UnsetType = UNSET
    max_context_length: int | UnsetType = UNSET


class ModelsV1(Struct, frozen=True):
    """All models that the key may use."""

    models: list[ModelV1]


async def list_v0(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /api/v0/models`."""
    await send_body(send, 200, msgspec.json.encode(ModelsV0([_v0(entry) for entry in await _entries(catalog, scope)])))


async def list_v1(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /api/v1/models`."""
    await send_body(send, 200, msgspec.json.encode(ModelsV1([_v1(entry) for entry in await _entries(catalog, scope)])))


async def _entries(catalog: Catalog, scope: Scope) -> list[CatalogEntry]:
    """Return the models that the caller may use, except rerankers and audio models, for which LM Studio has no type."""
    entries = await catalog.list(record_of(scope).caller)
    return [entry for entry in entries if entry.kind not in (RERANK, AUDIO)]


def _v0(entry: CatalogEntry) -> ModelV0:
    bits, loaded_context = entry.facts.bits, entry.loaded_context
    return ModelV0(
        entry.name,
        "embeddings" if entry.kind == EMBED else "vlm" if "image" in entry.modalities else "llm",
        "not-loaded" if loaded_context is None else "loaded",
        ("tool_use",) if entry.knows_tools else (),
        publisher=_publisher(entry),
        arch=entry.facts.architecture or UNSET,
        quantization=f"{bits}bit" if bits else UNSET,
        max_context_length=entry.longest_context or UNSET,
        loaded_context_length=UNSET if loaded_context is None else loaded_context,
    )


def _v1(entry: CatalogEntry) -> ModelV1:
    facts, loaded_context = entry.facts, entry.loaded_context
    return ModelV1(
        entry.name,
        entry.name,
        [] if loaded_context is None else [Instance(entry.name, InstanceConfig(loaded_context))],
        Capabilities("image" in entry.modalities, entry.knows_tools),
        "embedding" if entry.kind == EMBED else "llm",
        quantization=Quantization(f"{facts.bits}bit", facts.bits) if facts.bits else None,
        publisher=_publisher(entry),
        architecture=facts.architecture or UNSET,
        size_bytes=facts.size_bytes or UNSET,
        max_context_length=entry.longest_context or UNSET,
    )


def _publisher(entry: CatalogEntry) -> str | UnsetType:
    """Return the owner of a repository on the hub; empty for a folder."""
    owner, slash, name = entry.model.path.partition("/")
    return owner if slash and owner not in ("", ".", "..", "~") and "/" not in name else UNSET
