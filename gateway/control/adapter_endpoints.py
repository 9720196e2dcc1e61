"""Adapters on the unix socket, loaded and unloaded while their model runs. The routes have vLLM's names."""

import asyncio
import time
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope

from gateway.access.caller import OWNER
from gateway.adapter_loads import NotAllowed, allowed_path, with_adapter
from gateway.config.settings import Config
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control.json_endpoint import get, post
from gateway.control_types import AdapterList, AdapterLoad, AdapterRef, AdapterStatus
from gateway.errors import ApiError, BadRequest, Unavailable, from_failure
from gateway.reload import Reloader
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.model_info import AdapterInfo

# A worker has this long to read the files and enable the adapter, or to disable it.
CHANGE_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.02
_load = msgspec.json.Decoder(AdapterLoad)
_ref = msgspec.json.Decoder(AdapterRef)


def routes(services: Services, reloader: Reloader) -> list[Route]:
    endpoints = _AdapterEndpoints(services, reloader)
    return [
        get("/v1/adapters", endpoints.list),
        post("/v1/load_lora_adapter", endpoints.load),
        post("/v1/unload_lora_adapter", endpoints.unload),
    ]


class _AdapterEndpoints:
    def __init__(self, services: Services, reloader: Reloader) -> None:
        self._services = services
        self._reloader = reloader

    async def list(self, scope: Scope, receive: Receive) -> AdapterList:
        """`GET /v1/adapters`: the adapters of all models."""
        services, loads = self._services, self._reloader.adapter_loads
        return AdapterList(
            [
                status_of(services, model.name, name, is_configured=(model.name, name) not in loads)
                for model in services.config.models.values()
                for name in model.adapters
            ]
        )

    async def load(self, scope: Scope, receive: Receive) -> AdapterStatus:
        """`POST /v1/load_lora_adapter` with `{"lora_name": NAME, "lora_path": FOLDER}`, and `model` where there are
        several. It answers when the adapter is loaded, and loads its model first if need be."""
        expected = 'The body must be {"lora_name": NAME, "lora_path": FOLDER}'
        order = await read_order(scope, receive, _load, expected)
        command = note(scope, Command("adapter.load", order.lora_name[:200], {"path": order.lora_path[:1000]}))
        if order.load_inplace or order.is_3d_lora_weight:
            field = "load_inplace" if order.load_inplace else "is_3d_lora_weight"
            raise BadRequest(f"{field} is not supported: unload the adapter, then load it.", field)
        services, name = self._services, order.lora_name
        model = self._model(order)
        command.target = f"{model}:{name[:200]}"
        config = services.config
        try:
            path = await asyncio.to_thread(
                allowed_path, order.lora_path, config.adapter_dir, config.server.adapter_folders
            )
            with_adapter(config, model, name, path)
            await services.pool.ensure_ready(model)
            # The name is checked again, because another command may have taken it during the load.
            await self._reloader.load_adapter(model, name, path)
        except NotAllowed as reason:
            raise BadRequest(f"The adapter {name!r} cannot be loaded: {reason}.", "lora_name") from None
        except ModelUnavailable as error:
            raise from_failure(error.failure, error.retry_after_s, is_operator=True) from None
        info = await _until(services, model, name, path)
        if _path_of(services.config, model, name) != path:
            what = f"adapter {name!r}" if model in services.config.models else f"model {model!r}"
            message = f"The adapter {name!r} was not loaded: the {what} was taken out meanwhile."
            raise BadRequest(message, "lora_name")
        if info is None or info.failure is not None:
            await self._reloader.unload_adapter(model, name)
            if info is None or info.failure is None:
                raise Unavailable(f"The worker of {model} did not load the adapter in time.", 5.0)
            raise BadRequest(info.failure.message, "lora_path", "bad_adapter")
        return status_of(services, model, name, is_configured=False)

    def _model(self, order: AdapterLoad) -> str:
        """Return the name of the model to which an adapter belongs. Raises `BadRequest` if several are possible."""
        models = self._services.config.models
        if not order.model and len(models) == 1:
            return next(iter(models))
        if not order.model and not self._services.config.server.default:
            raise BadRequest("There are several models: name the adapter's in 'model'.", "model")
        return self._services.router.locate(order.model, OWNER).model.name

    async def unload(self, scope: Scope, receive: Receive) -> AdapterStatus:
        """`POST /v1/unload_lora_adapter` with `{"lora_name": NAME}`. Running requests of the adapter finish."""
        order = await read_order(scope, receive, _ref, 'The body must be {"lora_name": NAME}')
        command = note(scope, Command("adapter.unload", order.lora_name[:200]))
        services = self._services
        adapter = self._reloader.adapter_loads.find(order.lora_name)
        if adapter is None:
            every = (each for model in services.config.models.values() for each in model.adapted)
            if any(order.lora_name in each.names for each in every):
                raise BadRequest(f"{order.lora_name!r} is configured: take it out of the file and reload.", "lora_name")
            raise ApiError(404, f"There is no adapter {order.lora_name[:200]!r}.", param="lora_name", code="not_found")
        model, name = adapter
        command.target = f"{model}:{name}"
        status = status_of(services, model, name, is_configured=False)
        await self._reloader.unload_adapter(model, name)
        await _until(services, model, name, None)
        return status


async def _until(services: Services, model: str, name: str, path: str | None) -> AdapterInfo | None:
    """Wait until the worker reports an adapter from `path`, and return it. If `path` is None, wait until the adapter is
    gone.

    Also returns None when a reload or another command has removed the adapter, when the model is no longer loaded, and
    after a time-out.
    """
    end = time.monotonic() + CHANGE_TIMEOUT_S
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
    """Return the folder of an adapter. None if the configuration has no such adapter or model."""
    known = config.models.get(model)
    return None if known is None else known.adapters.get(name)


def status_of(services: Services, model: str, name: str, *, is_configured: bool) -> AdapterStatus:
    """Return the status of an adapter, as reported by the worker of its model."""
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
