"""`GET /v1/models` and `GET /v1/models/{id}`: the fields of OpenAI, of Anthropic, and a few more that clients read.

Each dialect's clients skip the fields of the other, so there is one form for all.
"""

import time
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.config.names import Found
from gateway.http.exchange import send_body
from gateway.media.modalities import TEXT, modalities
from gateway.request.record import record_of
from gateway.services import Services
from gateway.supervisor.state import WorkerView


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
    # The model of which this is a profile.
    parent: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    # As its worker says, or before a load as its files promise.
    input_modalities: tuple[str, ...] = (TEXT,)


class ModelList(Struct, frozen=True, tag_field="object", tag="list"):
    """Always whole: `has_more` is for Anthropic's clients, which turn pages until it is false."""

    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class Models:
    """An ASGI endpoint for the list."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        views = {view.name: view for view in self._services.pool.workers()}
        models = record_of(scope).caller.usable(self._services.config.models.values())
        cards = [
            self.card(Found(model, profile), views[model.name]) for model in models for profile in ("", *model.profiles)
        ]
        ids = [card.id for card in cards] or [None]
        await send_body(send, 200, msgspec.json.encode(ModelList(cards, ids[0], ids[-1])))

    def card(self, found: Found, view: WorkerView) -> ModelCard:
        model, profile = found.model, found.profile
        name = f"{model.name}:{profile}" if profile else model.name
        context = view.ready.max_context if view.ready is not None else model.context or UNSET
        return ModelCard(
            name,
            self._created,
            datetime.fromtimestamp(self._created, UTC).isoformat(),
            name,
            tuple(f"{alias}:{profile}" for alias in model.aliases) if profile else model.aliases,
            str(view.state),
            root=model.path,
            parent=model.name if profile else UNSET,
            context_length=context,
            max_model_len=context,
            max_input_tokens=context,
            input_modalities=modalities(model.path, view.ready),
        )


class OneModel:
    """An ASGI endpoint for one model, by its name or an alias; ids hold slashes."""

    def __init__(self, services: Services, models: Models) -> None:
        self._services = services
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = self._services.router.locate(scope["path_params"]["id"], record_of(scope).caller)
        view = self._services.pool.worker(target.model.name).view()
        await send_body(send, 200, msgspec.json.encode(self._models.card(target, view)))
