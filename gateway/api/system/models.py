"""`GET /v1/models` and `GET /v1/models/{id}`. One answer has the fields of OpenAI, Anthropic and llama.cpp.

Clients of each skip the fields of the others.
"""

from datetime import UTC, datetime
from typing import Self

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.config.settings import SamplingDefaults
from gateway.http.bodies import send_body
from gateway.media.modalities import TEXT
from gateway.request.record import record_of
from gateway.workers.supervisor.state import State, WorkerView


class ModelMeta(Struct, frozen=True):
    """Numbers that llama.cpp's clients read. Unknown numbers are left out. `size` is in bytes."""

    n_ctx: int | UnsetType = UNSET
    n_ctx_train: int | UnsetType = UNSET
    n_params: int | UnsetType = UNSET
    size: int | UnsetType = UNSET


class LoadProgress(Struct, frozen=True):
    """Progress of a load. A number of bytes is 0 if it is not known yet."""

    stage: str
    loaded_bytes: int
    total_bytes: int


class DefaultSampling(Struct, frozen=True):
    """Sampling defaults for requests that do not set these fields.

    Without `max_tokens`, only the context limits an answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, defaults: SamplingDefaults) -> Self:
        fields = msgspec.structs.asdict(defaults)
        return cls(**{name: fields[name] for name in cls.__struct_fields__ if fields[name] is not None})


class ModelCard(Struct, frozen=True, tag_field="object", tag="model"):
    """One model. `context_length`, `max_model_len` and `max_input_tokens` are one number for three kinds of clients.

    `input_modalities` and `kind` are those of its worker, before a load those of its files. `kind` is what it makes:
    `text`, `embed` for embeddings, `rerank` for scores of pairs, or `audio`. `kv_bits` is left out where the KV is not
    quantized, `load` unless it is being loaded. `parent` is the model of which it is a profile or an adapter.
    """

    id: str
    created: int
    created_at: str
    display_name: str
    aliases: tuple[str, ...]
    state: str
    type: str = "model"
    lifecycle: str = "active"
    owned_by: str = "mlxd"
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    input_modalities: tuple[str, ...] = (TEXT,)
    kind: str = TEXT
    kv_bits: int | UnsetType = UNSET
    meta: ModelMeta = ModelMeta()
    default_sampling: DefaultSampling = DefaultSampling()
    load: LoadProgress | UnsetType = UNSET


class ModelSummary(Struct, frozen=True):
    """One model in the form of TypeSafe's list."""

    name: str
    description: str
    release_date: str


class ModelList(Struct, frozen=True, tag_field="object", tag="list"):
    """All models: `has_more` is for Anthropic's clients, which request pages until it is false, and `models` for
    TypeSafe's."""

    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    models: list[ModelSummary] = []


async def list_models(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /v1/models`."""
    caller = record_of(scope).caller
    cards = [_card(entry, caller, catalog.created_s) for entry in await catalog.list(caller)]
    ids = [card.id for card in cards] or [None]
    models = [ModelSummary(card.id, f"A model of kind {card.kind}.", card.created_at[:10]) for card in cards]
    await send_body(send, 200, msgspec.json.encode(ModelList(cards, ids[0], ids[-1], models=models)))


async def get_model(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /v1/models/{id}`, by a model's name or an alias; ids hold slashes."""
    caller = record_of(scope).caller
    entry = await catalog.find(scope["path_params"]["id"], caller)
    await send_body(send, 200, msgspec.json.encode(_card(entry, caller, catalog.created_s)))


def _card(entry: CatalogEntry, caller: Caller, created_s: int) -> ModelCard:
    model, profile = entry.model, entry.profile
    aliases = tuple(name for name in model.names if name != model.full_name)
    context, facts = entry.context or UNSET, entry.facts
    return ModelCard(
        entry.name,
        created_s,
        datetime.fromtimestamp(created_s, UTC).isoformat(),
        entry.name,
        tuple(f"{alias}:{profile}" for alias in aliases) if profile else aliases,
        str(entry.view.state),
        root=entry.source(caller),
        parent=entry.parent or UNSET,
        context_length=context,
        max_model_len=context,
        max_input_tokens=context,
        input_modalities=entry.modalities,
        kind=entry.kind,
        kv_bits=entry.kv_bits or UNSET,
        meta=ModelMeta(context, facts.context or UNSET, facts.parameters or UNSET, facts.size_bytes or UNSET),
        default_sampling=DefaultSampling.of(entry.sampling),
        load=_load(entry.view),
    )


def _load(view: WorkerView) -> LoadProgress | UnsetType:
    is_loading = view.state in (State.STARTING, State.LOADING)
    return LoadProgress(view.stage, view.loaded_bytes, view.total_bytes) if is_loading else UNSET
