"""Models on the page: those of this machine, and those of the hub, which a child process queries."""

import asyncio
import os
import sys
from typing import Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, BadRequest, Overloaded, Unavailable
from gateway.http.exchange import send_body
from gateway.model_files.listing import ConfiguredModel, list_models
from gateway.services import Services
from gateway.web.schemas import HubAnswer, HubModels, HubOrder, ModelFilesList, PullOrder
from gateway.workers.memory.host import ThisMachine

CHILD: Final = (sys.executable, "-P", "-m", "gateway.web.hub_child")
TIMEOUT_S: Final = 90.0
# Concurrent queries of the hub; one more is refused.
QUERIES_MAX: Final = 2
WORDS_MAX: Final = 16
_TEXT_MAX: Final = 200

_encode: Final = msgspec.json.Encoder().encode
_answer: Final = msgspec.json.Decoder(HubAnswer)


def routes(services: Services, prefix: str) -> list[Route]:
    """Return all routes."""
    hub = Hub(services)
    return [
        Route(f"{prefix}/models", ModelFiles(services), methods=["GET"]),
        Route(f"{prefix}/hub/search", Search(hub), methods=["GET"]),
        Route(f"{prefix}/hub/recommend", Recommend(hub), methods=["GET"]),
        Route(f"{prefix}/hub/info", Inspect(hub), methods=["GET"]),
    ]


def available_bytes(services: Services) -> int:
    """Return the memory that one model could have if all others were unloaded for it."""
    memory = services.pool.memory()
    return min(memory.budget_bytes, ThisMachine().available() + memory.footprint_bytes)


class ModelFiles:
    """`GET /ui/api/models`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        models = services.config.models
        known = [
            ConfiguredModel(
                name=view.name,
                path=view.path,
                aliases=models[view.name].aliases,
                dtype=models[view.name].dtype,
                context=models[view.name].context,
                state=str(view.state),
                is_loaded=view.pid != 0,
            )
            for view in services.pool.workers()
        ]
        available = available_bytes(services)
        listed = await asyncio.to_thread(list_models, known, available)
        await send_body(send, 200, _encode(ModelFilesList(listed, available)))


class Hub:
    """Queries of the hub in child processes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._running = 0

    async def ask(self, verb: str, words: list[str] = [], repository: str = "") -> HubModels:  # noqa: B006
        """Run one query. Raises `ApiError` with the hub's error."""
        if self._running >= QUERIES_MAX:
            raise Overloaded("Other questions to the hub are running. Try again in a moment.", 1.0)
        order = {
            "verb": verb,
            "available_bytes": available_bytes(self._services),
            "words": words,
            "repository": repository,
        }
        self._running += 1
        try:
            answer = await self._child(msgspec.convert(order, HubOrder))
        finally:
            self._running -= 1
        if answer.models is None:
            raise ApiError(502, f"{answer.error[:1]}{answer.error[1:]}.", type="hub_error", code="hub_failed")
        return answer.models

    async def _child(self, order: HubOrder) -> HubAnswer:
        environ = os.environ | {"MLXD_HOME": str(self._services.config.home)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *CHILD, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environ
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, _ = await process.communicate(_encode(order))
        except TimeoutError:
            raise Unavailable("The hub did not answer in time.", code="hub_timeout") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return _answer.decode(out)
        except msgspec.DecodeError:
            raise Unavailable("The question to the hub failed; 'mlxctl search' says why.", code="hub_failed") from None


class Search:
    """`GET /ui/api/hub/search?words=…`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = QueryParams(scope["query_string"]).get("words", "")[:_TEXT_MAX].split()[:WORDS_MAX]
        if not words:
            raise BadRequest("'words' is what the model's name has.", "words", "invalid_value")
        await send_body(send, 200, _encode(await self._hub.ask("search", words)))


class Recommend:
    """`GET /ui/api/hub/recommend`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, _encode(await self._hub.ask("recommend")))


class Inspect:
    """`GET /ui/api/hub/info?repository=ORG/NAME`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = QueryParams(scope["query_string"]).get("repository", "")
        try:
            order = msgspec.convert({"repository": asked}, PullOrder)
        except msgspec.ValidationError:
            raise BadRequest("'repository' is ORG/NAME.", "repository", "invalid_value") from None
        models = await self._hub.ask("info", repository=order.repository)
        await send_body(send, 200, _encode(models.models[0]))
