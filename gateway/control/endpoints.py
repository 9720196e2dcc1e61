"""Control API of the unix socket: status, usage, drain, reload, and commands for models. The page shares some of it."""

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
from gateway.access.audit_log import Action
from gateway.access.caller import OWNER
from gateway.access.ledger import DIMENSIONS, LedgerLine
from gateway.config.settings import ConfigError, ModelConfig, url_of
from gateway.control.command_body import read_order
from gateway.control.commands import Command, model_commands, note
from gateway.control.json_endpoint import JsonHandler, get, post
from gateway.control_types import (
    CommandDone,
    DaemonStatus,
    DrainRequest,
    DrainResult,
    GroupStatus,
    KeyUsage,
    MemoryStatus,
    ModelRef,
    ModelStatus,
    RankStatus,
    ReloadResult,
    UsageLine,
    UsageLines,
    UsageReport,
)
from gateway.errors import BadRequest, Unavailable, from_failure
from gateway.model_files.known_times import speeds
from gateway.reload import Reloader, facts_of
from gateway.services import Services
from gateway.workers.supervisor.state import MemoryView, ModelMemory, ModelUnavailable, WorkerView
from protocol.from_worker import Ready
from protocol.kinds import TEXT
from protocol.stats import RankStats, StatusStats

PAUSE_POLL_S: Final = 0.05
USAGE_DAYS: Final = 30

_model_ref = msgspec.json.Decoder(ModelRef)
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
        *(
            post(f"/v1/models/{verb}", endpoints.command(action, run))
            for verb, action, run in model_commands(services.pool)
        ),
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
        memory = services.pool.memory()
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
            queue_bound=model.slots + model.max_waiting,
            restarts=view.restarts,
            stage=view.stage,
            loaded_bytes=view.loaded_bytes,
            total_bytes=view.total_bytes,
            generation_tokens=numbers.generation_tokens,
            prompt_tokens=numbers.prompt_tokens,
            prompt_tokens_cached=numbers.prompt_tokens_cached,
            last_failure=view.last_failure.message if view.last_failure else "",
            retry_after_s=round(view.retry_after_s, 1),
            is_pinned=services.pool.is_pinned(view.name),
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

    def command(self, action: Action, run: Callable[[str], Awaitable[None]]) -> JsonHandler:
        """Return the handler of `POST` with `{"model": NAME}`, which answers when `run` has returned."""

        async def handler(scope: Scope, receive: Receive) -> CommandDone:
            ref = await read_order(scope, receive, _model_ref, 'The body must be {"model": NAME}')
            command = note(scope, Command(action, ref.model))
            command.target = name = self._services.router.resolve(ref.model, OWNER).name
            worker = self._services.pool.worker(name)
            try:
                await run(name)
            except ModelUnavailable as error:
                raise from_failure(error.failure, error.retry_after_s, is_operator=True) from None
            return CommandDone(name, str(worker.state))

        return handler

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
