"""Lines of the daemon's log on the web page: the last lines of the files, and new lines for viewers who
watch the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import ApiError, BadRequest
from gateway.http.exchange import json_response
from gateway.services import Services
from gateway.telemetry.log_file import last_lines
from gateway.telemetry.log_reader import is_about, read_line
from gateway.telemetry.logs import LEVELS, OURS
from gateway.web.schemas import LogLine, LogLines

LINES_DEFAULT: Final = 200
LINES_MAX: Final = 1000
# Maximum number of lines in one event of the feed, which is sent once a second.
EVENT_LINES_MAX: Final = 50
_HEAD: Final = frozenset({"time", "level", "logger", "message", "exception"})
_TEXT_MAX: Final = 200


async def list_log_lines(services: Services, request: Request) -> Response:
    """Answer `GET /ui/api/logs`."""
    query, config = request.query_params, services.config
    if not config.server.log_file:
        raise ApiError(404, "[server] log_file is off: the log goes to stderr.", code="no_log_file")
    lines = await asyncio.to_thread(last_lines, config.log_path, _count(query), _filter(query))
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
            self.take()

    def take(self) -> LogLines | None:
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
