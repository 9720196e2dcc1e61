"""Adapters on the unix socket: load and unload while their model runs, by the names that vLLM gives these routes."""

import asyncio
import time
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access.caller import OWNER
from gateway.adapter_loads import NotAllowed, allowed_path, with_adapter
from gateway.config.settings import Config
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control_types import AdapterList, AdapterLoad, AdapterRef, AdapterStatus
from gateway.errors import ApiError, BadRequest, Unavailable, from_failure
from gateway.http.exchange import send_body
from gateway.reload import Reloader
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.model_info import AdapterInfo

# Of a worker that reads the files and puts the adapter into force, or lets go of one.
CHANGE_S: Final = 300.0
_POLL_S: Final = 0.02
_load = msgspec.json.Decoder(AdapterLoad)
_ref = msgspec.json.Decoder(AdapterRef)


def routes(services: Services, reloader: Reloader) -> list[Route]:
    return [
        Route("/v1/adapters", ListAdapters(services, reloader), methods=["GET"]),
        Route("/v1/load_lora_adapter", LoadAdapter(services, reloader), methods=["POST"]),
        Route("/v1/unload_lora_adapter", UnloadAdapter(services, reloader), methods=["POST"]),
    ]


class ListAdapters:
    """`GET /v1/adapters`: those of all models, as their workers have them."""

    def __init__(self, services: Services, reloader: Reloader) -> None:
        self._services = services
        self._reloader = reloader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, loads = self._services, self._reloader.adapter_loads
        adapters = [
            status_of(services, model.name, name, is_configured=(model.name, name) not in loads)
            for model in services.config.models.values()
            for name in model.adapters
        ]
        await send_body(send, 200, msgspec.json.encode(AdapterList(adapters)))


class LoadAdapter:
    """`POST /v1/load_lora_adapter` with `{"lora_name": NAME, "lora_path": FOLDER}`, and `model` where there are
    several. It answers when the adapter is loaded, and loads its model first if it has to."""

    def __init__(self, services: Services, reloader: Reloader) -> None:
        self._services = services
        self._reloader = reloader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        expected = 'The body must be {"lora_name": NAME, "lora_path": FOLDER}'
        asked = await read_order(scope, receive, _load, expected)
        order = note(scope, Command("adapter.load", asked.lora_name[:200], {"path": asked.lora_path[:1000]}))
        if asked.load_inplace or asked.is_3d_lora_weight:
            field = "load_inplace" if asked.load_inplace else "is_3d_lora_weight"
            raise BadRequest(f"{field} is not supported: unload the adapter, then load it.", field)
        services = self._services
        model = self._model(asked)
        order.target = f"{model}:{asked.lora_name[:200]}"
        config = services.config
        try:
            path = await asyncio.to_thread(
                allowed_path, asked.lora_path, config.adapter_dir, config.server.adapter_folders
            )
            with_adapter(config, model, asked.lora_name, path)
        except NotAllowed as reason:
            raise BadRequest(f"The adapter {asked.lora_name!r} cannot be loaded: {reason}.", "lora_name") from None
        try:
            await services.pool.ensure_ready(model)
        except ModelUnavailable as error:
            raise from_failure(error.failure, error.retry_after_s, is_operator=True) from None
        try:
            await self._reloader.load_adapter(model, asked.lora_name, path)
        except NotAllowed as reason:  # another order was quicker
            raise BadRequest(f"The adapter {asked.lora_name!r} cannot be loaded: {reason}.", "lora_name") from None
        info = await _until(services, model, asked.lora_name, path)
        if _path_of(services.config, model, asked.lora_name) != path:
            what = f"adapter {asked.lora_name!r}" if model in services.config.models else f"model {model!r}"
            message = f"The adapter {asked.lora_name!r} was not loaded: the {what} was taken out meanwhile."
            raise BadRequest(message, "lora_name")
        if info is None or info.failure is not None:
            await self._reloader.unload_adapter(model, asked.lora_name)
            if info is None or info.failure is None:
                raise Unavailable(f"The worker of {model} did not load the adapter in time.", 5.0)
            raise BadRequest(info.failure.message, "lora_path", "bad_adapter")
        status = status_of(services, model, asked.lora_name, is_configured=False)
        await send_body(send, 200, msgspec.json.encode(status))

    def _model(self, asked: AdapterLoad) -> str:
        """The name of the model that an adapter is for."""
        models = self._services.config.models
        if not asked.model and len(models) == 1:
            return next(iter(models))
        if not asked.model and not self._services.config.server.default:
            raise BadRequest("There are several models: name the adapter's in 'model'.", "model")
        return self._services.router.locate_here(asked.model, OWNER).model.name


class UnloadAdapter:
    """`POST /v1/unload_lora_adapter` with `{"lora_name": NAME}`. Requests that run with it finish."""

    def __init__(self, services: Services, reloader: Reloader) -> None:
        self._services = services
        self._reloader = reloader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await read_order(scope, receive, _ref, 'The body must be {"lora_name": NAME}')
        order = note(scope, Command("adapter.unload", asked.lora_name[:200]))
        services = self._services
        found = self._reloader.adapter_loads.find(asked.lora_name)
        if found is None:
            every = (each for model in services.config.models.values() for each in model.adapted)
            if any(asked.lora_name in each.names for each in every):
                raise BadRequest(f"{asked.lora_name!r} is configured: take it out of the file and reload.", "lora_name")
            raise ApiError(404, f"There is no adapter {asked.lora_name[:200]!r}.", param="lora_name", code="not_found")
        model, name = found
        order.target = f"{model}:{name}"
        status = status_of(services, model, name, is_configured=False)
        await self._reloader.unload_adapter(model, name)
        await _until(services, model, name, None)
        await send_body(send, 200, msgspec.json.encode(status))


async def _until(services: Services, model: str, name: str, path: str | None) -> AdapterInfo | None:
    """Wait until a worker has an adapter from this path, or has it no more: its word on it, None where it has none.

    It ends as well when a reload, or another order, takes out an adapter that is waited for.
    """
    end = time.monotonic() + CHANGE_S
    while time.monotonic() < end and path in (None, _path_of(services.config, model, name)):
        worker = services.pool.find(model)
        if worker is None or worker.ready is None:
            return None
        info = next((each for each in worker.ready.adapters if each.name == name), None)
        if info is None if path is None else info is not None and info.path == path:
            return info
        await asyncio.sleep(_POLL_S)
    return None


def _path_of(config: Config, model: str, name: str) -> str | None:
    """The folder of an adapter, None where the configuration is without it or its model."""
    known = config.models.get(model)
    return None if known is None else known.adapters.get(name)


def status_of(services: Services, model: str, name: str, *, is_configured: bool) -> AdapterStatus:
    """An adapter as the worker of its model has it."""
    worker = services.pool.find(model)
    ready = worker.ready if worker is not None and worker.state is State.READY else None
    info = next((each for each in ready.adapters if each.name == name), None) if ready is not None else None
    served = services.metrics.model(model).adapters[name]
    path = services.config.models[model].adapters[name]
    if info is None:
        return AdapterStatus(name, model, path, "unloaded", is_configured=is_configured, requests=served)
    failure = "" if info.failure is None else info.failure.message
    kind = "" if failure else "dora" if info.is_dora else "lora"
    return AdapterStatus(
        name,
        model,
        path,
        "failed" if failure else "loaded",
        kind,
        info.rank,
        info.nbytes,
        info.base,
        failure,
        is_configured,
        served,
    )
