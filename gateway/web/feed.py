"""Feed of the web page: the daemon's state once a second, as server-sent events that are encoded once for all viewers.

The feed runs only while there are viewers. Its cost grows with models and requests, never with tokens.

One sample per second of each model for ten minutes, so that charts are full as soon as the page is opened.

Lines of the daemon's log on the web page: the last lines of the files, and new lines for viewers who
watch the log.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import astuple
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.control_types import DaemonStatus, MemoryStatus, ModelStatus, RequestView
from gateway.errors import BadRequest, Overloaded
from gateway.http.bodies import json_response
from gateway.http.sse import HEADERS, StreamWatch, cut_off
from gateway.model_files.pull_queue import PullQueue, PullStatus
from gateway.request.record import ChunkWriter, record_of
from gateway.services import Services
from gateway.telemetry.logs import LEVELS, OURS, is_about, last_lines, read_line
from gateway.web.schemas import (
    Chart,
    Charts,
    FeedPing,
    FeedSnapshot,
    FeedTick,
    LogLine,
    LogLines,
    ModelTick,
    StateChange,
)
from gateway.web.session import Sessions, WebSession, session_of
from gateway.workers.supervisor.state import WorkerView

INTERVAL_S: Final = 1.0
POINTS: Final = 600


@dataclass(slots=True)
class _Series:
    """One model's samples, and the values of its counters at the newest sample. Only `Sampler` changes it."""

    generated: int
    prompted: int
    chart: Chart = field(default_factory=lambda: Chart([], [], [], [], []))


class Sampler:
    """Samples models as long as the daemon runs. The cost does not depend on the number of requests or viewers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._series: dict[str, _Series] = {}
        self._newest = time.monotonic()
        self._until = time.time()

    async def run(self) -> None:
        """Sample periodically, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Add one sample for each model."""
        services, now = self._services, time.monotonic()
        span_s, self._newest, self._until = max(now - self._newest, 1e-3), now, time.time()
        memory = services.pool.broker.view().models
        views = services.pool.workers()
        for view in views:
            own = memory.get(view.name)
            self._add(view, span_s, own.footprint_bytes if own is not None else 0)
        for removed in self._series.keys() - {view.name for view in views}:
            del self._series[removed]

    def rates(self, model: str) -> tuple[float, float]:
        """Return generated and prompt tokens per second of a model, from its newest sample."""
        series = self._series.get(model)
        return (0.0, 0.0) if series is None else (series.chart.tokens_per_s[-1], series.chart.prompt_tokens_per_s[-1])

    def charts(self) -> Charts:
        """Return the samples of all models. A model that was added recently has fewer."""
        return Charts(self._until, INTERVAL_S, {name: series.chart for name, series in self._series.items()})

    def _add(self, view: WorkerView, span_s: float, footprint_bytes: int) -> None:
        numbers = self._services.metrics.model(view.name)
        series = self._series.get(view.name)
        if series is None:
            series = self._series[view.name] = _Series(numbers.generation_tokens, numbers.prompt_tokens_computed)
        chart = series.chart
        # A counter restarts at 0 if its model was removed and added again.
        chart.tokens_per_s.append(round(max(0, numbers.generation_tokens - series.generated) / span_s, 1))
        chart.prompt_tokens_per_s.append(round(max(0, numbers.prompt_tokens_computed - series.prompted) / span_s, 1))
        series.generated, series.prompted = numbers.generation_tokens, numbers.prompt_tokens_computed
        running = view.stats.running if view.stats else 0
        inside = self._services.admission.inside(view.name)
        chart.running.append(running)
        chart.waiting.append(max(view.stats.waiting if view.stats else 0, inside - running))
        chart.footprint_bytes.append(footprint_bytes)
        for samples in astuple(chart):
            del samples[:-POINTS]


LINES_DEFAULT: Final = 200
LINES_MAX: Final = 1000
# Maximum number of lines in one event of the feed, which is sent once a second.
EVENT_LINES_MAX: Final = 50
_HEAD: Final = frozenset({"time", "level", "logger", "message", "exception"})
_TEXT_MAX: Final = 200


async def list_log_lines(services: Services, request: Request) -> Response:
    """Answer `GET /ui/api/logs`."""
    query = request.query_params
    lines = await asyncio.to_thread(last_lines, services.config.log_path, _count(query), _filter(query))
    return json_response(LogLines([_line(fields) for line in lines if (fields := read_line(line)) is not None]))


def _filter(query: QueryParams) -> Callable[[str], bool]:
    """Return a function that selects the lines that a query asks for. Raises `BadRequest`."""
    level, model, text = query.get("level", "debug"), query.get("model", ""), query.get("text", "")[:_TEXT_MAX].lower()
    if level not in LEVELS:
        raise BadRequest(f"'level' is one of {', '.join(LEVELS)}.", "level", "invalid_value")
    levels = frozenset(LEVELS[LEVELS.index(level) :])

    def is_wanted(line: str) -> bool:
        if text and text not in line.lower():
            return False
        fields = read_line(line)
        return fields is not None and fields.get("level") in levels and (not model or is_about(line, model))

    return is_wanted


class LogTail(logging.Handler):
    """Collects new log lines of all threads for the next event of the feed. Lines beyond an event's size are only
    counted.

    The handler is installed only while a viewer watches the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = deque[LogLine]()
        self._dropped = 0
        self._viewers = 0

    def watch(self) -> None:
        """Count one more viewer who watches the log."""
        self._viewers += 1
        if self._viewers == 1:
            for name in OURS:
                logging.getLogger(name).addHandler(self)

    def leave(self) -> None:
        """Count one viewer less."""
        self._viewers -= 1
        if self._viewers == 0:
            for name in OURS:
                logging.getLogger(name).removeHandler(self)
            self.read_lines()

    def read_lines(self) -> LogLines | None:
        """Return the lines since the last call; None if there are none."""
        self.acquire()
        try:
            lines, self._lines = list(self._lines), deque[LogLine]()
            dropped, self._dropped = self._dropped, 0
        finally:
            self.release()
        return LogLines(lines, dropped) if lines else None

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record. Runs in the thread that logs, under the handler's lock."""
        if len(self._lines) >= EVENT_LINES_MAX:
            self._dropped += 1
            return
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = getattr(record, "fields", None) or {}
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        line = LogLine(time, record.levelname.lower(), record.name, record.getMessage(), fields, trace)
        self._lines.append(line)


def _line(fields: dict[str, Any]) -> LogLine:
    rest = {name: value for name, value in fields.items() if name not in _HEAD}
    time, level, logger, message, trace = (
        str(fields.get(name, "")) for name in ("time", "level", "logger", "message", "exception")
    )
    return LogLine(time, level, logger, message, rest, trace)


def _count(query: QueryParams) -> int:
    given = query.get("lines", str(LINES_DEFAULT))
    count = int(given) if given.isascii() and given.isdigit() and len(given) <= len(str(LINES_MAX)) else 0
    if not 1 <= count <= LINES_MAX:
        raise BadRequest(f"'lines' is 1 to {LINES_MAX}.", "lines", "invalid_value")
    return count


PING_S: Final = 15.0
VIEWERS_MAX: Final = 32
# Maximum number of pending events of a viewer. A viewer that falls further behind gets a snapshot instead.
QUEUE_MAX: Final = 4
REQUESTS_MAX: Final = 50
# If only counters of requests change, their list is sent at this interval. It is shorter than two ticks, because the
# time between ticks varies.
REQUEST_LIST_INTERVAL_S: Final = 1.5
_OWN: Final = frozenset({"tokens_per_s", "prompt_tokens_per_s"})
_TICK_FIELDS: Final = tuple(name for name in ModelTick.__struct_fields__ if name not in _OWN)

_encode: Final = msgspec.json.Encoder(enc_hook=str).encode


@dataclass(slots=True, eq=False)
class _Viewer:
    """One open stream. The task of its request owns it; the feed adds events."""

    session: WebSession
    wants_log: bool
    # `writer` writes directly to the connection while the task waits. This saves waking a task per viewer and event.
    writer: ChunkWriter | None
    queue: list[bytes] = field(default_factory=list[bytes])
    needs_snapshot: bool = True
    is_over: bool = False
    # True once the first bytes are sent, while the viewer's task waits for events.
    is_idle: bool = False
    wrote_at: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, event: bytes) -> None:
        """Send an event immediately to a viewer that keeps up. A slower viewer loses its pending events and continues
        from a snapshot.
        """
        if self.is_idle and self.writer is not None and self.writer.is_open:
            self.writer.write(event)
            self.wrote_at = time.monotonic()
            return
        if len(self.queue) >= QUEUE_MAX:
            self.queue.clear()
            self.needs_snapshot = True
        else:
            self.queue.append(event)
        self._wake()

    def end(self) -> None:
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        # Later events must be queued after those that now wait.
        self.is_idle = False
        self.news.set()


@dataclass(slots=True)
class _FeedState:
    """State at the newest tick. The next state is compared with it."""

    models: dict[str, ModelTick] = field(default_factory=dict[str, ModelTick])
    memory: MemoryStatus | None = None
    requests: list[RequestView] = field(default_factory=list[RequestView])
    requests_in_all: int = 0
    pulls: list[PullStatus] = field(default_factory=list[PullStatus])
    is_draining: bool = False


class Feed:
    """`GET /ui/api/feed`, an ASGI endpoint. Belongs to the event loop."""

    def __init__(
        self,
        services: Services,
        status: Callable[[], DaemonStatus],
        sampler: Sampler,
        downloads: PullQueue,
        sessions: Sessions,
    ) -> None:
        self._services = services
        self._status = status
        self._sampler = sampler
        self._downloads = downloads
        self._sessions = sessions
        self._log = LogTail()
        self._viewers: set[_Viewer] = set()
        self._seen = _FeedState()
        self._snapshot: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._ui = services.config.ui
        # The state from which requests were sent last, and the time when they were sent.
        self._sent = self._seen
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._viewers) >= VIEWERS_MAX:
            raise Overloaded(f"{VIEWERS_MAX} pages view already. Close one.", 10.0)
        wants_log = QueryParams(scope["query_string"]).get("log") == "1"
        viewer = _Viewer(session_of(scope), wants_log, record_of(scope).writer)
        async with cut_off(record_of(scope), receive) as watch:
            self._join(viewer)
            try:
                await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})
                await self._show(viewer, send, watch)
            finally:
                self._leave(viewer)

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def close(self) -> None:
        """End every stream when the daemon ends."""
        for viewer in self._viewers:
            viewer.end()

    def _join(self, viewer: _Viewer) -> None:
        self._ui = self._services.config.ui if not self._viewers else self._ui
        # The new viewer must start from the same state as all others.
        self._send_changes()
        self._viewers.add(viewer)
        if viewer.wants_log:
            self._log.watch()
        self._services.metrics.on_state = self._on_state
        if self._task is None:
            self._task = self._services.tasks.start(self._run(), "feed of the page")

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if viewer.wants_log:
            self._log.leave()
        if not self._viewers:
            self._services.metrics.on_state = None
            if self._task is not None:
                self._task.cancel()
                self._task = None

    async def _show(self, viewer: _Viewer, send: Send, watch: StreamWatch) -> None:
        is_over = False
        while not is_over:
            data = await self._next(viewer)
            is_over = viewer.is_over
            if is_over:
                data += _event("end", {})
            if not data:
                continue
            await watch.write(send, data, more=not is_over)

    async def _next(self, viewer: _Viewer) -> bytes:
        """Wait for events of the viewer, or return a ping."""
        if not (viewer.queue or viewer.needs_snapshot or viewer.is_over):
            viewer.news.clear()
            viewer.is_idle = True
            try:
                async with asyncio.timeout(PING_S):
                    await viewer.news.wait()
            except TimeoutError:
                is_silent = time.monotonic() - viewer.wrote_at >= PING_S
                return _event("ping", FeedPing(time.time())) if is_silent else b""
            finally:
                viewer.is_idle = False
        queue, viewer.queue = viewer.queue, []
        if viewer.needs_snapshot:
            viewer.needs_snapshot = False
            return self._newest_snapshot()
        return b"".join(queue)

    async def _run(self) -> None:
        while self._viewers:
            await asyncio.sleep(INTERVAL_S)
            self._end_some()
            self._send_changes()
            if (lines := self._log.read_lines()) is not None:
                event = _event("log", lines)
                for viewer in self._viewers:
                    if viewer.wants_log:
                        viewer.offer(event)

    def _end_some(self) -> None:
        """End the streams whose session has ended, or all streams if a reload has changed who may have a session."""
        ui = self._services.config.ui
        for viewer in self._viewers:
            if ui != self._ui or not self._sessions.is_alive(viewer.session):
                viewer.end()
        self._ui = ui

    def _send_changes(self) -> None:
        """Compare with the previous state, and send what has changed."""
        status = self._status()
        tick, self._seen = self._compare(status)
        self._snapshot = None
        if tick != FeedTick(tick.time):
            self._offer(_event("tick", tick))

    def _compare(self, status: DaemonStatus) -> tuple[FeedTick, _FeedState]:
        before, requests = self._seen, self._services.requests.views()
        seen = _FeedState(
            models={model.name: self._numbers(model) for model in status.models},
            memory=status.memory,
            requests=requests[:REQUESTS_MAX],
            requests_in_all=len(requests),
            pulls=self._downloads.views(),
            is_draining=status.is_draining,
        )
        has_new_requests = self._has_new_requests(seen)
        tick = FeedTick(
            time=time.time(),
            models=[model for name, model in seen.models.items() if before.models.get(name) != model],
            removed=[name for name in before.models if name not in seen.models],
            memory=seen.memory if seen.memory != before.memory else None,
            requests=seen.requests if has_new_requests else None,
            requests_in_all=seen.requests_in_all if has_new_requests else None,
            pulls=seen.pulls if seen.pulls != before.pulls else None,
            is_draining=seen.is_draining if seen.is_draining != before.is_draining else None,
        )
        return tick, seen

    def _has_new_requests(self, seen: _FeedState) -> bool:
        """Whether to send the list of requests: immediately if a request starts, ends or changes state; after a while
        if only counters differ.
        """
        sent, now = self._sent, time.monotonic()
        is_other = seen.requests_in_all != sent.requests_in_all or _states(seen.requests) != _states(sent.requests)
        if is_other or (seen.requests != sent.requests and now - self._sent_at >= REQUEST_LIST_INTERVAL_S):
            self._sent, self._sent_at = seen, now
            return True
        return False

    def _numbers(self, model: ModelStatus) -> ModelTick:
        generated, prompted = self._sampler.rates(model.name)
        fields = {name: getattr(model, name) for name in _TICK_FIELDS}
        return ModelTick(tokens_per_s=generated, prompt_tokens_per_s=prompted, **fields)

    def _newest_snapshot(self) -> bytes:
        """Return a snapshot of the same state as the newest tick. It is made at most once per tick."""
        if self._snapshot is None:
            status, seen = self._status(), self._seen
            assert status.memory is not None
            snapshot = FeedSnapshot(
                time=time.time(),
                version=status.version,
                url=status.url,
                uptime_s=status.uptime_s,
                is_draining=seen.is_draining,
                models=status.models,
                memory=seen.memory or status.memory,
                requests=seen.requests,
                requests_in_all=seen.requests_in_all,
                pulls=seen.pulls,
                captures_on=self._services.captures.is_on,
            )
            self._snapshot = _event("snapshot", snapshot)
        return self._snapshot

    def _on_state(self, model: str, state: str) -> None:
        self._offer(_event("state", StateChange(time.time(), model, state)))

    def _offer(self, event: bytes) -> None:
        for viewer in self._viewers:
            viewer.offer(event)


def _states(requests: list[RequestView]) -> list[tuple[str, str]]:
    return [(request.id, request.state) for request in requests]


def _event(name: str, data: Struct | dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))
