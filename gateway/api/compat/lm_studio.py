"""Lists of models in LM Studio's forms: `GET /api/v0/models` and `GET /api/v1/models`."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.http.exchange import send_body
from gateway.request.record import record_of
from protocol.kinds import AUDIO, EMBED, RERANK

Kind = Literal["llm", "vlm", "embeddings"]


class ModelV0(Struct, frozen=True):
    """One model. What is not known is left out."""

    id: str
    type: Kind
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
    """Quantization of most weights."""

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
    """Abilities of a model, by its files or its worker."""

    vision: bool
    trained_for_tool_use: bool


class ModelV1(Struct, frozen=True):
    """One model. `key` is the name to ask for."""

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


class ListV0:
    """An ASGI endpoint."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries = await self._catalog.list(record_of(scope).caller)
        await send_body(send, 200, msgspec.json.encode(ModelsV0([_v0(entry) for entry in entries if _is_known(entry)])))


class ListV1:
    """An ASGI endpoint."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries = await self._catalog.list(record_of(scope).caller)
        await send_body(send, 200, msgspec.json.encode(ModelsV1([_v1(entry) for entry in entries if _is_known(entry)])))


def _v0(entry: CatalogEntry) -> ModelV0:
    ready, bits = entry.view.ready, entry.facts.bits
    return ModelV0(
        entry.name,
        "embeddings" if entry.kind == EMBED else "vlm" if _sees(entry) else "llm",
        "loaded" if ready is not None and entry.is_loaded else "not-loaded",
        ("tool_use",) if entry.knows_tools else (),
        publisher=_publisher(entry),
        arch=entry.facts.architecture or UNSET,
        quantization=f"{bits}bit" if bits else UNSET,
        max_context_length=entry.longest_context or UNSET,
        loaded_context_length=ready.max_context if ready is not None and entry.is_loaded else UNSET,
    )


def _v1(entry: CatalogEntry) -> ModelV1:
    ready, facts = entry.view.ready, entry.facts
    return ModelV1(
        entry.name,
        entry.name,
        [] if ready is None or not entry.is_loaded else [Instance(entry.name, InstanceConfig(ready.max_context))],
        Capabilities(_sees(entry), entry.knows_tools),
        "embedding" if entry.kind == EMBED else "llm",
        quantization=Quantization(f"{facts.bits}bit", facts.bits) if facts.bits else None,
        publisher=_publisher(entry),
        architecture=facts.architecture or UNSET,
        size_bytes=facts.size_bytes or UNSET,
        max_context_length=entry.longest_context or UNSET,
    )


def _is_known(entry: CatalogEntry) -> bool:
    """Whether LM Studio has a type for it: none for rerankers and audio."""
    return entry.kind not in (RERANK, AUDIO)


def _sees(entry: CatalogEntry) -> bool:
    return "image" in entry.modalities


def _publisher(entry: CatalogEntry) -> str | UnsetType:
    """The owner of a repository of the hub; a folder has none."""
    owner, slash, name = entry.found.model.path.partition("/")
    return owner if slash and owner not in ("", ".", "..", "~") and "/" not in name else UNSET
