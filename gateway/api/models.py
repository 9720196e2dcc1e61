"""`GET /v1/models` and `GET /v1/models/{id}`: OpenAI's fields, and a few more that clients read."""

import time

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.config import ModelConfig
from gateway.http import send_body
from gateway.pool.state import WorkerView
from gateway.services import Services


class ModelCard(Struct, frozen=True, tag_field="object", tag="model"):
    """One model. `context_length` and `max_model_len` are the same number in two clients' words."""

    id: str
    created: int
    aliases: tuple[str, ...]
    state: str
    owned_by: str = "mlxd"
    root: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class ModelList(Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelCard]


class Models:
    """An ASGI endpoint for the list."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        views = {view.name: view for view in self._services.pool.workers()}
        cards = [self.card(model, views[model.name]) for model in self._services.config.models.values()]
        await send_body(send, 200, msgspec.json.encode(ModelList(cards)))

    def card(self, model: ModelConfig, view: WorkerView) -> ModelCard:
        context = view.ready.max_context if view.ready is not None else model.context or UNSET
        return ModelCard(
            model.name,
            self._created,
            model.aliases,
            str(view.state),
            root=model.path,
            context_length=context,
            max_model_len=context,
        )


class OneModel:
    """An ASGI endpoint for one model, by its name or an alias; ids hold slashes."""

    def __init__(self, services: Services, models: Models) -> None:
        self._services = services
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._services.router.resolve(scope["path_params"]["id"])
        view = self._services.pool.worker(model.name).view()
        await send_body(send, 200, msgspec.json.encode(self._models.card(model, view)))
