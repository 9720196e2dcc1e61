"""`GET /v1/models`, also at `/models`, and `GET /v1/models/{id}`: the fields of OpenAI, Anthropic and llama.cpp.

Each dialect's clients skip the fields of the others, so there is one form for all.
"""

import time
from datetime import UTC, datetime
from typing import Self

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.api.common.catalog import Catalog, CatalogEntry
from gateway.config.settings import SamplingDefaults
from gateway.http.exchange import send_body
from gateway.media.modalities import TEXT
from gateway.request.record import record_of
from gateway.workers.supervisor.state import State, WorkerView


class ModelMeta(Struct, frozen=True):
    """Numbers as llama.cpp's clients read them; what is not known is left out. `size` is in bytes."""

    n_ctx: int | UnsetType = UNSET
    n_ctx_train: int | UnsetType = UNSET
    n_params: int | UnsetType = UNSET
    size: int | UnsetType = UNSET


class LoadProgress(Struct, frozen=True):
    """Progress of a load; 0 bytes are not known yet."""

    stage: str
    loaded_bytes: int
    total_bytes: int


class DefaultSampling(Struct, frozen=True):
    """Sampling of requests that do not set it. Without `max_tokens` an answer ends where its context does."""

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
        told = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}
        return cls(**{name: value for name, value in told.items() if name in cls.__struct_fields__})


class ModelCard(Struct, frozen=True, tag_field="object", tag="model"):
    """One model. `context_length`, `max_model_len` and `max_input_tokens` are one number in three clients' words."""

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
    # The model of which this is a profile or an adapter.
    parent: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    # As its worker says, or before a load as its files promise.
    input_modalities: tuple[str, ...] = (TEXT,)
    # What it makes: `text`, `embed` for embeddings, `rerank` for scores of pairs, or `audio`.
    kind: str = TEXT
    # Bits of a number of its KV; left out where it is as the model computes it.
    kv_bits: int | UnsetType = UNSET
    meta: ModelMeta = ModelMeta()
    default_sampling: DefaultSampling = DefaultSampling()
    # While it loads.
    load: LoadProgress | UnsetType = UNSET


class ModelList(Struct, frozen=True, tag_field="object", tag="list"):
    """Always whole: `has_more` is for Anthropic's clients, which turn pages until it is false."""

    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class Models:
    """An ASGI endpoint for the list."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = record_of(scope).caller
        cards = [self.card(entry, caller) for entry in await self._catalog.list(caller)]
        ids = [card.id for card in cards] or [None]
        await send_body(send, 200, msgspec.json.encode(ModelList(cards, ids[0], ids[-1])))

    def card(self, entry: CatalogEntry, caller: Caller) -> ModelCard:
        model, profile = entry.found.model, entry.found.profile
        aliases = tuple(name for name in model.names if name != model.full_name)
        context, facts = entry.context or UNSET, entry.facts
        return ModelCard(
            entry.name,
            self._created,
            datetime.fromtimestamp(self._created, UTC).isoformat(),
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


class OneModel:
    """An ASGI endpoint for one model, by its name or an alias; ids hold slashes."""

    def __init__(self, catalog: Catalog, models: Models) -> None:
        self._catalog = catalog
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = record_of(scope).caller
        entry = await self._catalog.find(scope["path_params"]["id"], caller)
        await send_body(send, 200, msgspec.json.encode(self._models.card(entry, caller)))


def _load(view: WorkerView) -> LoadProgress | UnsetType:
    is_loading = view.state in (State.STARTING, State.LOADING)
    return LoadProgress(view.stage, view.loaded_bytes, view.total_bytes) if is_loading else UNSET
