"""Models on the web page: those on this machine, downloads, and those on the hub, which a child process queries."""

import asyncio
import os
import sys
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.errors import ApiError, BadRequest, Overloaded, Unavailable
from gateway.http.exchange import json_response
from gateway.model_files.listing import ConfiguredModel, list_models
from gateway.model_files.pull_queue import PullQueue
from gateway.services import Services
from gateway.web.schemas import HubAnswer, HubModels, HubOrder, ModelFilesList, PullOrder, Pulls
from gateway.workers.memory.host import ThisMachine

CHILD: Final = (sys.executable, "-P", "-m", "gateway.web.hub_child")
TIMEOUT_S: Final = 90.0
# Maximum number of concurrent queries to the hub. Further queries are refused.
QUERIES_MAX: Final = 2
WORDS_MAX: Final = 16
_TEXT_MAX: Final = 200

_answer: Final = msgspec.json.Decoder(HubAnswer)
_order: Final = msgspec.json.Decoder(PullOrder)


class ModelFinder:
    """Endpoints for models on this machine, models on the hub, and downloads. At most `QUERIES_MAX` child processes
    query the hub.
    """

    def __init__(self, services: Services, downloads: PullQueue) -> None:
        self._services = services
        self._downloads = downloads
        self._running = 0

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/models", self._list_files, methods=["GET"]),
            Route(f"{prefix}/hub/search", self._search, methods=["GET"]),
            Route(f"{prefix}/hub/recommend", self._recommend, methods=["GET"]),
            Route(f"{prefix}/hub/info", self._inspect, methods=["GET"]),
            Route(f"{prefix}/pulls", self._list_or_add_pulls, methods=["GET", "POST"]),
            Route(f"{prefix}/pulls/{{id}}", self._cancel_pull, methods=["DELETE"]),
        ]

    async def _list_files(self, request: Request) -> Response:
        models = self._services.config.models
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
            for view in self._services.pool.workers()
        ]
        available = self._available_bytes()
        listed = await asyncio.to_thread(list_models, known, available)
        return json_response(ModelFilesList(listed, available))

    async def _search(self, request: Request) -> Response:
        words = request.query_params.get("words", "")[:_TEXT_MAX].split()[:WORDS_MAX]
        if not words:
            raise BadRequest("'words' is what the model's name has.", "words", "invalid_value")
        return json_response(await self._query(HubOrder("search", self._available_bytes(), words)))

    async def _recommend(self, request: Request) -> Response:
        return json_response(await self._query(HubOrder("recommend", self._available_bytes())))

    async def _inspect(self, request: Request) -> Response:
        name = {"repository": request.query_params.get("repository", "")}
        try:
            repository = msgspec.convert(name, PullOrder).repository
        except msgspec.ValidationError:
            raise BadRequest("'repository' is ORG/NAME.", "repository", "invalid_value") from None
        models = await self._query(HubOrder("info", self._available_bytes(), repository=repository))
        return json_response(models.models[0])

    async def _list_or_add_pulls(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._pull(request)
        return json_response(Pulls(self._downloads.views()))

    async def _pull(self, request: Request) -> Response:
        repository = (await read_order(request.scope, request.receive, _order)).repository
        note(request.scope, Command("model.pull", repository))
        return json_response(self._downloads.order(repository), 202)

    async def _cancel_pull(self, request: Request) -> Response:
        pull = self._downloads.cancel(request.path_params["id"])
        note(request.scope, Command("model.pull", pull.repository, {"cancelled": True}))
        return json_response(pull)

    def _available_bytes(self) -> int:
        """Return the memory that one model could have if all others were unloaded for it."""
        memory = self._services.pool.memory()
        return min(memory.budget_bytes, ThisMachine().available() + memory.footprint_bytes)

    async def _query(self, order: HubOrder) -> HubModels:
        """Run one query in a child process. Raises `ApiError` with the hub's error."""
        if self._running >= QUERIES_MAX:
            raise Overloaded("Other questions to the hub are running. Try again in a moment.", 1.0)
        self._running += 1
        try:
            answer = await self._child(order)
        finally:
            self._running -= 1
        if answer.models is None:
            raise ApiError(502, f"{answer.error}.", type="hub_error", code="hub_failed")
        return answer.models

    async def _child(self, order: HubOrder) -> HubAnswer:
        environ = os.environ | {"MLXD_HOME": str(self._services.config.home)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *CHILD, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environ
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, _ = await process.communicate(msgspec.json.encode(order))
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
