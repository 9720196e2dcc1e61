"""`GET /props`: the properties of a model that clients of llama.cpp's server read."""

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.common.catalog import Catalog
from gateway.http.exchange import send_body
from gateway.request.record import record_of


class SlotSettings(Struct, frozen=True):
    """Settings of each slot. If the model is not loaded, `n_ctx` comes from its files; it is left out if unknown."""

    n_ctx: int | UnsetType = UNSET


class PropsModalities(Struct, frozen=True):
    """Media that a prompt may contain."""

    vision: bool
    audio: bool


class Props(Struct, frozen=True):
    """Properties of a model. `total_slots` is the maximum number of concurrent sequences."""

    default_generation_settings: SlotSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: PropsModalities
    build_info: str
    chat_template: str | UnsetType = UNSET
    chat_template_tool_use: str | UnsetType = UNSET


async def model_props(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /props`, by default for the default model or the only one that the caller may use."""
    caller = record_of(scope).caller
    name = QueryParams(scope["query_string"]).get("model", "")
    if not name:
        usable = caller.usable(catalog.services.config.models.values())
        name = usable[0].name if len(usable) == 1 else ""
    entry = await catalog.find(name, caller)
    ready = entry.view.ready
    props = Props(
        SlotSettings(entry.longest_context or UNSET),
        ready.max_running if ready is not None else entry.model.slots,
        entry.name,
        entry.source(caller),
        PropsModalities("image" in entry.modalities, "audio" in entry.modalities),
        f"mlxd-{protocol.__version__}",
        entry.chat_template or UNSET,
        (not entry.model.chat_template and entry.facts.tool_template) or UNSET,
    )
    await send_body(send, 200, msgspec.json.encode(props))
