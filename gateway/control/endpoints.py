"""Admin API of the unix socket: what runs, and load, unload, restart. The page has some of it for its sessions."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import date, timedelta
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.access.audit_log import Action
from gateway.access.caller import OWNER
from gateway.access.ledger import DIMENSIONS, LedgerLine
from gateway.config.settings import ConfigError, ModelConfig, url_of
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
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
    UsageLine,
    UsageLines,
    UsageReport,
)
from gateway.errors import BadRequest, Unavailable, from_failure
from gateway.http.exchange import send_body
from gateway.model_files.known_times import speeds
from gateway.reload import Reloader, facts_of
from gateway.remote.peers.explanation import explain
from gateway.services import Services
from gateway.workers.supervisor.state import MemoryView, ModelMemory, ModelUnavailable, WorkerView
from protocol.from_worker import Ready
from protocol.kinds import TEXT
from protocol.stats import RankStats, StatusStats

PAUSE_POLL_S = 0.05
USAGE_DAYS = 30


_model_ref = msgspec.json.Decoder(ModelRef)
_drain_order = msgspec.json.Decoder(DrainRequest)


class StatusEndpoint:
    """`GET /v1/status`."""

    def __init__(self, services: Services, url: str | None = None) -> None:
        self._services = services
        self._url = url or url_of(services.config.server)
        self._started = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, msgspec.json.encode(self.status()))

    def status(self) -> DaemonStatus:
        """The daemon and every model, as they are now."""
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


def _carried(source: object | None, names: Iterable[str]) -> dict[str, Any]:
    """Fields of these names as they are; nothing of what is not there, so that the defaults hold."""
    return {} if source is None else {name: getattr(source, name) for name in names}


def _of_memory(own: ModelMemory | None) -> dict[str, Any]:
    idle = {} if own is None else {"idle_s": round(own.idle_s, 1)}
    return _carried(own, ("share_bytes", "floor_bytes", "footprint_bytes", "is_gated")) | idle


def _of_ready(ready: Ready | None, model: ModelConfig) -> dict[str, Any]:
    """What a loaded model says of itself, or its configuration."""
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
    """The ranks of a model; those of rank 0 that its gateway knows anyway are not told by it."""
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


class RouteOf:
    """`GET /v1/route?model=NAME&tokens=N`: the place that a request would be sent to, and why."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, query = self._services, QueryParams(scope["query_string"])
        name, tokens = query.get("model", ""), query.get("tokens", "1000")
        if not (tokens.isascii() and tokens.isdecimal()) or len(tokens) > 9:
            raise BadRequest("'tokens' is a number of tokens.", "tokens", "invalid_value")
        model = services.router.locate(name, OWNER).model if name else None
        view = explain(services.fleet, model, float(tokens))
        await send_body(send, 200, msgspec.json.encode(view))


class ReloadConfig:
    """`POST /v1/config/reload`: read the file again and apply what has changed. A bad file is a 400."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = note(scope, Command("config.reload"))
        try:
            done = await self._reloader.reload()
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from None
        order.facts = facts_of(done)
        await send_body(send, 200, msgspec.json.encode(done))


class DrainEndpoint:
    """`POST /v1/drain`: the end of the daemon, as SIGTERM begins it. Answers when every request has ended."""

    def __init__(self, drain: Callable[[float | None], Awaitable[int]], services: Services) -> None:
        self._drain = drain
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = await read_order(scope, receive, _drain_order, 'The body must be {"timeout_s": SECONDS}')
        note(scope, Command("daemon.drain", facts={"timeout_s": order.timeout_s, "stays": str(order.stays).lower()}))
        left = await (self._pause(order.timeout_s) if order.stays else self._drain(order.timeout_s))
        await send_body(send, 200, msgspec.json.encode(DrainResult(left)))

    async def _pause(self, timeout_s: float | None) -> int:
        """Refuse new requests from now on, and wait for those that run. Returns how many still do at the deadline."""
        services = self._services
        services.admission.is_paused = True
        limit_s = services.config.server.drain_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit_s
        while services.requests.views() and time.monotonic() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(PAUSE_POLL_S)
        return len(services.requests.views())


class UndrainEndpoint:
    """`POST /v1/undrain`: take requests again after a drain that stays up."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(scope, Command("daemon.undrain"))
        admission = self._services.admission
        if admission.is_draining:
            raise Unavailable("The server is shutting down.", code="draining")
        admission.is_paused = False
        await send_body(send, 200, msgspec.json.encode(DrainResult(0)))


class KeyUsageEndpoint:
    """`GET /v1/keys/usage`: what each key has used, also before the daemon was started."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        usage = UsageReport(self._services.usage.since, keys, dict(metrics.auth_failures))
        await send_body(send, 200, msgspec.json.encode(usage))


class UsageByDay:
    """`GET /v1/usage?from=DAY&to=DAY&by=day,key,model`: the last 30 days by key, unless asked otherwise."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query, ledger = QueryParams(scope["query_string"]), self._services.ledger
        last = _day(query, "to") or ledger.today()
        first = _day(query, "from") or _days_before(last, USAGE_DAYS - 1)
        if first > last:
            raise BadRequest(f"'from' ({first}) is after 'to' ({last}).", "from", "invalid_value")
        by = [name for name in query.get("by", "key").split(",") if name]
        if len(set(by)) != len(by) or not set(by) <= set(DIMENSIONS):
            raise BadRequest(f"'by' is a list of {', '.join(DIMENSIONS)}.", "by", "invalid_value")
        lines = [_usage_line(line, by) for line in await ledger.lines(first, last, by)]
        report = UsageLines(first.isoformat(), last.isoformat(), by, lines)
        await send_body(send, 200, msgspec.json.encode(report))


class CommandEndpoint:
    """`POST /v1/models/{load,unload,restart}` with `{"model": NAME}`; answers when it is done."""

    def __init__(self, services: Services, run: Callable[[str], Awaitable[None]], action: Action) -> None:
        self._services = services
        self._run = run
        self._action: Action = action

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ref = await read_order(scope, receive, _model_ref, 'The body must be {"model": NAME}')
        order = note(scope, Command(self._action, ref.model))
        order.target = name = self._services.router.resolve(ref.model, OWNER).name
        worker = self._services.pool.worker(name)
        try:
            await self._run(name)
        except ModelUnavailable as error:
            raise from_failure(error.failure, error.retry_after_s, is_operator=True) from None
        await send_body(send, 200, msgspec.json.encode(CommandDone(name, str(worker.state))))


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
