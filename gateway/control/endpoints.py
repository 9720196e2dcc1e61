"""Control API of the unix socket: status, usage, drain, reload, and commands for models. The page shares some of it.

Running and captured requests, for the unix socket and the page: list, show, cancel, clear.

Adapters on the unix socket, loaded and unloaded while their model runs. The routes have vLLM's names.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import date, timedelta
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope

import protocol
from gateway.access.caller import OWNER
from gateway.access.ledger import DIMENSIONS, LedgerLine
from gateway.adapter_loads import NotAllowed, allowed_path, with_adapter
from gateway.config.settings import Config, ConfigError, ModelConfig, url_of
from gateway.control.commands import Command, JsonHandler, ModelCommands, get, note, post, read_order
from gateway.control_types import (
    AdapterList,
    AdapterLoad,
    AdapterRef,
    AdapterStatus,
    CancelResult,
    ClearedCaptures,
    DaemonStatus,
    DrainRequest,
    DrainResult,
    GroupStatus,
    KeyUsage,
    MemoryStatus,
    ModelStatus,
    RankStatus,
    ReloadResult,
    RequestDetail,
    RequestList,
    RequestRef,
    RequestWhy,
    UsageLine,
    UsageLines,
    UsageReport,
)
from gateway.errors import ApiError, BadRequest, Unavailable, from_failure
from gateway.model_files.known_times import speeds
from gateway.reload import Reloader, facts_of
from gateway.request.why_slow import explain
from gateway.services import Services
from gateway.workers.supervisor.state import MemoryView, ModelMemory, ModelUnavailable, State, WorkerView
from protocol.checkpoint import TEXT
from protocol.from_worker import AdapterInfo, Ready
from protocol.stats import RankStats, StatusStats

_ref = msgspec.json.Decoder(RequestRef)


def request_routes(services: Services, prefix: str = "/v1") -> list[Route]:
    endpoints = _RequestEndpoints(services)
    return [
        get(f"{prefix}/requests", endpoints.list),
        post(f"{prefix}/requests/cancel", endpoints.cancel),
        post(f"{prefix}/requests/clear", endpoints.clear),
        get(f"{prefix}/requests/{{id}}", endpoints.show),
        get(f"{prefix}/requests/{{id}}/why", endpoints.why),
    ]


class _RequestEndpoints:
    def __init__(self, services: Services) -> None:
        self._requests = services.requests
        self._captures = services.captures
        self._services = services

    async def list(self, scope: Scope, receive: Receive) -> RequestList:
        """`GET /v1/requests`, with `?captured=1` for captured requests as well."""
        wants_captured = QueryParams(scope["query_string"]).get("captured") == "1"
        captured = await self._captures.lines() if wants_captured else []
        return RequestList(self._requests.views(), captured)

    async def show(self, scope: Scope, receive: Receive) -> RequestDetail:
        """`GET /v1/requests/ID`: the running request and the newest captured one of this id."""
        name = scope["path_params"]["id"]
        detail = RequestDetail(self._requests.view(name), await self._captures.find(name))
        if detail.live is None and detail.captured is None:
            hint = "" if self._captures.is_on else "; to keep those that have ended, set [server] capture"
            raise _unknown(name, hint)
        if detail.captured is not None:
            note(scope, Command("capture.read", name[:200]))
        return detail

    async def why(self, scope: Scope, receive: Receive) -> RequestWhy:
        """`GET /v1/requests/ID/why`: the causes of the time of a request that has ended, by its id or its answer's."""
        name = scope["path_params"]["id"]
        request = self._services.recent.find(name)
        if request is None:
            hint = " among the newest that have ended"
            raise _unknown(name, "; it still runs" if self._requests.view(name) is not None else hint)
        # A request without a key is the owner's own.
        return await explain(self._services, request, shows_text=request.key is None)

    async def cancel(self, scope: Scope, receive: Receive) -> CancelResult:
        """`POST /v1/requests/cancel` with `{"id": ID}`. The client gets an error in its own dialect."""
        name = (await read_order(scope, receive, _ref, 'The body must be {"id": ID}')).id
        note(scope, Command("request.cancel", name[:200]))
        if not self._requests.cancel(name):
            raise _unknown(name)
        return CancelResult(name)

    async def clear(self, scope: Scope, receive: Receive) -> ClearedCaptures:
        """`POST /v1/requests/clear`: delete every captured request."""
        command = note(scope, Command("capture.clear"))
        cleared = ClearedCaptures(await self._captures.clear())
        command.facts = msgspec.to_builtins(cleared)
        return cleared


def _unknown(name: str, hint: str = "") -> ApiError:
    return ApiError(404, f"There is no request {name[:200]!r}{hint}.", code="request_not_found")


# A worker has this long to read the files and enable the adapter, or to disable it.
CHANGE_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.02
_load = msgspec.json.Decoder(AdapterLoad)
_adapter_ref = msgspec.json.Decoder(AdapterRef)


def adapter_routes(services: Services, reloader: Reloader) -> list[Route]:
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
        return self._services.live.router.locate(order.model, OWNER).model.name

    async def unload(self, scope: Scope, receive: Receive) -> AdapterStatus:
        """`POST /v1/unload_lora_adapter` with `{"lora_name": NAME}`. Running requests of the adapter finish."""
        order = await read_order(scope, receive, _adapter_ref, 'The body must be {"lora_name": NAME}')
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


PAUSE_POLL_S: Final = 0.05
USAGE_DAYS: Final = 30

_drain_order = msgspec.json.Decoder(DrainRequest)


def routes(
    services: Services, reloader: Reloader, url: str, drain: Callable[[float | None], Awaitable[int]]
) -> list[Route]:
    """Return the routes of the unix socket. `drain` ends the daemon and returns how many requests were cut off."""
    endpoints = DaemonEndpoints(services, url)
    return [
        get("/v1/status", endpoints.show_status),
        get("/v1/keys/usage", endpoints.usage_by_key),
        get("/v1/usage", endpoints.usage_by_day),
        *ModelCommands(services, waits=True).routes("/v1"),
        post("/v1/config/reload", _reload_with(reloader)),
        post("/v1/drain", endpoints.drain_with(drain)),
        post("/v1/undrain", endpoints.undrain),
    ]


class DaemonEndpoints:
    """Handlers that show and change the state of the daemon."""

    def __init__(self, services: Services, url: str = "") -> None:
        self._services = services
        self._url = url or url_of(services.config.server)
        self._started = time.monotonic()

    async def show_status(self, scope: Scope, receive: Receive) -> DaemonStatus:
        """`GET /v1/status`."""
        return self.status()

    def status(self) -> DaemonStatus:
        """Return the current status of the daemon and of every model."""
        services = self._services
        memory = services.pool.broker.view()
        return DaemonStatus(
            protocol.__version__,
            os.getpid(),
            round(time.monotonic() - self._started, 1),
            self._url,
            str(services.config.home),
            str(services.config.config_path),
            services.admission.takes_none,
            [self._model(view, memory) for view in services.pool.workers()],
            MemoryStatus(memory.budget_bytes, memory.granted_bytes, memory.footprint_bytes, memory.waiting),
        )

    def _model(self, view: WorkerView, memory: MemoryView) -> ModelStatus:
        services = self._services
        model = services.config.models[view.name]
        numbers = services.metrics.model(view.name)
        return ModelStatus(
            name=view.name,
            path=view.path,
            aliases=model.aliases,
            state=str(view.state),
            pid=view.pid,
            epoch=view.epoch,
            since_s=round(view.since_s, 1),
            inside=services.admission.inside(view.name),
            queue_bound=services.admission.bound(model),
            restarts=view.restarts,
            stage=view.stage,
            loaded_bytes=view.loaded_bytes,
            total_bytes=view.total_bytes,
            generation_tokens=numbers.generation_tokens,
            prompt_tokens=numbers.prompt_tokens,
            prompt_tokens_cached=numbers.prompt_tokens_cached,
            last_failure=view.last_failure.message if view.last_failure else "",
            retry_after_s=round(view.retry_after_s, 1),
            is_pinned=services.pool.broker.is_pinned(view.name),
            is_waiting=view.name in memory.waiting,
            measured=speeds(services.pool.times.of(view.name, view.path)),
            group=_group(view),
            **_of_memory(memory.models.get(view.name)),
            **_of_ready(view.ready, model),
            **_carried(view.stats, StatusStats.__struct_fields__),
        )

    async def usage_by_key(self, scope: Scope, receive: Receive) -> UsageReport:
        """`GET /v1/keys/usage`: the usage of each key, kept over restarts."""
        self._services.keyring.refresh()
        metrics = self._services.metrics
        keys = [
            KeyUsage(
                name,
                sum(numbers.requests.values()),
                numbers.prompt_tokens,
                numbers.generation_tokens,
                numbers.running,
                dict(numbers.rejections),
                numbers.last_used,
            )
            for name, numbers in metrics.keys.items()
        ]
        return UsageReport(self._services.usage.since, keys, dict(metrics.auth_failures))

    async def usage_by_day(self, scope: Scope, receive: Receive) -> UsageLines:
        """`GET /v1/usage?from=DAY&to=DAY&by=day,key,model`. The default is the last 30 days by key."""
        query, ledger = QueryParams(scope["query_string"]), self._services.ledger
        last = _day(query, "to") or ledger.today()
        first = _day(query, "from") or _days_before(last, USAGE_DAYS - 1)
        if first > last:
            raise BadRequest(f"'from' ({first}) is after 'to' ({last}).", "from", "invalid_value")
        by = [name for name in query.get("by", "key").split(",") if name]
        if len(set(by)) != len(by) or not set(by) <= set(DIMENSIONS):
            raise BadRequest(f"'by' is a list of {', '.join(DIMENSIONS)}.", "by", "invalid_value")
        lines = [_usage_line(line, by) for line in await ledger.lines(first, last, by)]
        return UsageLines(first.isoformat(), last.isoformat(), by, lines)

    def drain_with(self, drain: Callable[[float | None], Awaitable[int]]) -> JsonHandler:
        """Return the handler of `POST /v1/drain`, which answers when every request has ended or is cut off."""

        async def handler(scope: Scope, receive: Receive) -> DrainResult:
            order = await read_order(scope, receive, _drain_order, 'The body must be {"timeout_s": SECONDS}')
            facts = {"timeout_s": order.timeout_s, "stays": str(order.stays).lower()}
            note(scope, Command("daemon.drain", facts=facts))
            return DrainResult(await (self._pause(order.timeout_s) if order.stays else drain(order.timeout_s)))

        return handler

    async def _pause(self, timeout_s: float | None) -> int:
        """Refuse new requests, and wait until the running ones have ended, at most `timeout_s`. Returns how many still
        run.
        """
        services = self._services
        services.admission.is_paused = True
        limit_s = services.config.server.drain_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit_s
        while services.requests.views() and time.monotonic() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(PAUSE_POLL_S)
        return len(services.requests.views())

    async def undrain(self, scope: Scope, receive: Receive) -> DrainResult:
        """`POST /v1/undrain`: accept requests again after a drain without an end."""
        note(scope, Command("daemon.undrain"))
        admission = self._services.admission
        if admission.is_draining:
            raise Unavailable("The server is shutting down.", code="draining")
        admission.is_paused = False
        return DrainResult(0)


def _reload_with(reloader: Reloader) -> JsonHandler:
    """Return the handler of `POST /v1/config/reload`. An invalid file is a 400."""

    async def handler(scope: Scope, receive: Receive) -> ReloadResult:
        command = note(scope, Command("config.reload"))
        try:
            done = await reloader.reload()
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from None
        command.facts = facts_of(done)
        return done

    return handler


def _carried(source: object | None, names: Iterable[str]) -> dict[str, Any]:
    """Return the named fields of `source`; empty if `source` is None, so that the defaults apply."""
    return {} if source is None else {name: getattr(source, name) for name in names}


def _of_memory(own: ModelMemory | None) -> dict[str, Any]:
    idle = {} if own is None else {"idle_s": round(own.idle_s, 1)}
    return _carried(own, ("share_bytes", "floor_bytes", "footprint_bytes", "is_gated")) | idle


def _of_ready(ready: Ready | None, model: ModelConfig) -> dict[str, Any]:
    """Return the fields that the loaded model reports or, if it is not loaded, those that its configuration has."""
    if ready is None:
        return {"slots": model.slots, "context": model.context, "weights_bytes": 0}
    media, embedding = ready.media, ready.embedding
    return {
        "slots": ready.max_running,
        "context": ready.max_context,
        "kind": ready.kind or TEXT,
        "tower_bytes": media.tower_bytes if media else 0,
        "media_reason": media.reason if media else "",
        "dimensions": embedding.dimensions if embedding else 0,
    } | _carried(ready, ("weights_bytes", "batch_mode", "batch_mode_reason", "modalities", "speculation", "attention"))


def _group(view: WorkerView) -> GroupStatus | None:
    """Return the ranks of a model. The gateway fills in the pid of rank 0, which does not report it."""
    group = view.ready.group if view.ready is not None else None
    if group is None:
        return None
    numbers = view.stats.ranks if view.stats is not None else ()
    ranks: list[RankStatus] = []
    for at, rank in enumerate(group.ranks):
        now = numbers[at] if at < len(numbers) else RankStats(0)
        pid = rank.pid or view.pid
        step_ms = round(now.step_us / 1e3, 1)
        ranks.append(
            RankStatus(rank.rank, rank.node, rank.host, pid, rank.device, rank.shard_bytes, now.memory, step_ms)
        )
    return GroupStatus(group.parallel, group.backend, tuple(ranks))


def _day(query: QueryParams, name: str) -> date | None:
    text = query.get(name)
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"'{name}' is a day, such as 2026-01-31.", name, "invalid_value") from None


def _days_before(day: date, days: int) -> date:
    try:
        return day - timedelta(days=days)
    except OverflowError:
        raise BadRequest("'to' is too early to have days before it: send 'from' too.", "to", "invalid_value") from None


def _usage_line(line: LedgerLine, by: list[str]) -> UsageLine:
    day, key, model = (getattr(line, name) if name in by else None for name in DIMENSIONS)
    return UsageLine(day, key, model, line.requests, line.prompt, line.cached, line.completion)
