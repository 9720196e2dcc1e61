"""`GET /props`: what clients of llama.cpp's server read of it, of one model."""

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.access.caller import Caller
from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.http.exchange import send_body
from gateway.request.record import record_of
from gateway.services import Services


class SlotSettings(Struct, frozen=True):
    """Settings of each slot. `n_ctx` is what is served, before a load as the model's files say; left out if unknown."""

    n_ctx: int | UnsetType = UNSET


class PropsModalities(Struct, frozen=True):
    """Media that a prompt may hold."""

    vision: bool
    audio: bool


class Props(Struct, frozen=True):
    """Properties of a model. `total_slots` are the sequences that run at once."""

    default_generation_settings: SlotSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: PropsModalities
    build_info: str
    chat_template: str | UnsetType = UNSET


class ModelProps:
    """An ASGI endpoint. Without `?model=` it is about the default model, or the only one that the caller may use."""

    def __init__(self, services: Services, catalog: Catalog) -> None:
        self._services = services
        self._catalog = catalog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = record_of(scope).caller
        name = QueryParams(scope["query_string"]).get("model", "")
        if not name:
            usable = caller.usable(self._services.config.models.values())
            name = usable[0].name if len(usable) == 1 else ""
        await send_body(send, 200, msgspec.json.encode(_props(await self._catalog.find(name, caller), caller)))


def _props(entry: CatalogEntry, caller: Caller) -> Props:
    model, ready = entry.found.model, entry.view.ready
    return Props(
        SlotSettings(entry.longest_context or UNSET),
        ready.max_running if ready is not None else model.slots,
        entry.name,
        entry.source(caller),
        PropsModalities("image" in entry.modalities, "audio" in entry.modalities),
        f"mlxd-{protocol.__version__}",
        entry.chat_template or UNSET,
    )
