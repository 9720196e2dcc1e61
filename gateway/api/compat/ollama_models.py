"""Models as in Ollama: `GET /api/tags`, `GET /api/ps`, `POST /api/show` and `GET /api/version`."""

import hashlib
import time
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.api.common import serve
from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.api.ollama.request import decode_show
from gateway.api.ollama.response import timestamp
from gateway.http.bodies import send_body
from gateway.request.record import ignored_header, record_of
from gateway.request.routing import over
from gateway.services import Services
from protocol.checkpoint import EMBED, TEXT

# mlxd implements the API of this version of Ollama and reports it. Clients refuse older versions.
VERSION: Final = "0.34.0"
# Reported as the expiry of a model that is never unloaded when idle.
NEVER: Final = "9999-12-31T23:59:59Z"
# A chat template that contains one of these texts can render reasoning, or turn it on.
_THINKING_MARKS: Final = ("<think", "enable_thinking", "reasoning_effort", "<|channel|>")
_BILLION: Final = 1_000_000_000
_MILLION: Final = 1_000_000


class OllamaVersion(Struct, frozen=True):
    """The version of Ollama's API."""

    version: str


class Details(Struct, frozen=True):
    """Details of a model's weights. A field is empty if the files do not determine it."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Tag(Struct, frozen=True):
    """One model. Requests name it by `name` or `model`. `size` is in bytes; 0 if its files are not on this machine."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(Struct, frozen=True):
    """All models that the key may use."""

    models: list[Tag]


class Running(Struct, frozen=True):
    """A loaded model. `size` and `size_vram` are both the memory of its worker, all of which the GPU can use."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Struct, frozen=True):
    """All loaded models that the key may use."""

    models: list[Running]


class ShowResponse(Struct, frozen=True):
    """One model in full. `model_info` has its architecture, parameters and context in the words of GGUF files."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    parent_model: str | UnsetType = UNSET


async def ollama_version(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /api/version`."""
    await send_body(send, 200, msgspec.json.encode(OllamaVersion(VERSION)))


async def list_tags(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /api/tags`."""
    entries = await catalog.list(record_of(scope).caller)
    await send_body(send, 200, msgspec.json.encode(Tags([_tag(entry) for entry in entries])))


async def list_running(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /api/ps`."""
    entries = await catalog.list(record_of(scope).caller)
    idle_s = {name: each.idle_s for name, each in catalog.services.pool.broker.view().models.items()}
    running = [_running(entry, idle_s) for entry in entries if not entry.parent]
    models = [each for each in running if each is not None]
    await send_body(send, 200, msgspec.json.encode(RunningModels(models)))


async def show_model(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /api/show`."""
    record = record_of(scope)
    request, unknown = await serve.read(catalog.services, record, scope, receive, decode_show)
    entry = await catalog.find(request.wanted, record.caller)
    await send_body(send, 200, msgspec.json.encode(_shown(entry, record.caller)), ignored_header(unknown))


def _tag(entry: CatalogEntry) -> Tag:
    return Tag(entry.name, entry.name, _modified(entry), entry.facts.size_bytes or 0, _digest(entry), _details(entry))


def _running(entry: CatalogEntry, idle_s: dict[str, float]) -> Running | None:
    ready, stats, context = entry.view.ready, entry.view.stats, entry.loaded_context
    if ready is None or context is None:
        return None
    size = stats.memory_bytes if stats is not None and stats.memory_bytes else ready.weights_bytes
    ttl_s = entry.model.ttl_s
    expires = NEVER
    if ttl_s:
        left_s = max(0.0, ttl_s - idle_s.get(entry.model.name, 0.0))
        expires = timestamp(datetime.fromtimestamp(time.time() + left_s, UTC))
    return Running(entry.name, entry.name, size, _digest(entry), _details(entry), expires, size, context)


def _shown(entry: CatalogEntry, caller: Caller) -> ShowResponse:
    facts, context = entry.facts, entry.longest_context
    info: dict[str, Any] = {"general.architecture": facts.architecture, "general.basename": entry.name}
    if facts.parameters:
        info["general.parameter_count"] = facts.parameters
    if context:
        info[f"{facts.architecture or 'mlx'}.context_length"] = context
    return ShowResponse(
        f"# The configuration of mlxd is mlxd.toml.\nFROM {entry.source(caller)}\n",
        "\n".join(f"{name} {value}" for name, value in _sampling(entry).items()),
        entry.chat_template,
        _details(entry),
        info,
        _capabilities(entry),
        _modified(entry),
        entry.parent or UNSET,
    )


def _sampling(entry: CatalogEntry) -> dict[str, object]:
    """Return the configured sampling under Ollama's names."""
    own = entry.model.sampling
    if entry.profile:
        own = over(entry.model.profiles[entry.profile].sampling, own)
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    return {names.get(name, name): value for name, value in msgspec.structs.asdict(own).items() if value is not None}


def _capabilities(entry: CatalogEntry) -> list[str]:
    has = {
        "insert": entry.facts.fills_middle,
        "tools": entry.knows_tools,
        "vision": "image" in entry.modalities,
        "audio": "audio" in entry.modalities,
        "thinking": any(sign in entry.templates for sign in _THINKING_MARKS),
    }
    if entry.kind != TEXT:
        # Ollama has no name for rerankers and audio models.
        return ["embedding"] if entry.kind == EMBED else []
    return ["completion", *(name for name, is_able in has.items() if is_able)]


def _details(entry: CatalogEntry) -> Details:
    facts = entry.facts
    families = [facts.architecture] if facts.architecture else []
    bits = f"{facts.bits}bit" if facts.bits else ""
    return Details(entry.parent, "mlx", facts.architecture, families, parameter_size(facts.parameters), bits)


def parameter_size(parameters: int | None) -> str:
    """Return a number of parameters in Ollama's format: 8.2B, 596.05M."""
    if not parameters:
        return ""
    if parameters >= _BILLION:
        return f"{parameters / _BILLION:.1f}B"
    return f"{parameters / _MILLION:.2f}M" if parameters >= _MILLION else f"{parameters / 1000:.2f}K"


def _digest(entry: CatalogEntry) -> str:
    """Return a hash that changes with a model's files. The weights are not read."""
    facts = entry.facts
    state = f"{entry.model.root}\0{facts.size_bytes}\0{facts.parameters}\0{facts.modified_s}"
    return hashlib.blake2b(state.encode(), digest_size=32).hexdigest()


def _modified(entry: CatalogEntry) -> str:
    return timestamp(datetime.fromtimestamp(entry.facts.modified_s, UTC))
