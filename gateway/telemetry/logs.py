"""Logs to stderr, as JSON lines or for a console, and to a file; each has a thread, so that nothing waits for a pipe.

Only the loggers of this project are touched; the level and the handlers of every library stay as they are.
"""

import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self, TextIO

import msgspec

# `worker` carries what worker processes print.
OURS: Final = ("gateway", "worker", "mlxd")
QUEUE_MAX: Final = 10_000
FLUSH_S: Final = 2.0
# What stderr still gets when it is no terminal and there is a file: how the daemon started, reloaded and ended.
LIFE: Final = ("gateway.daemon", "gateway.main", "gateway.workers.pool.pool", "gateway.reload")
LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_COLORS: Final = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31;1m"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what a record carries as `fields` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class ConsoleFormatter(logging.Formatter):
    """One line for a human, with colour on a terminal."""

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = escaped(f"{clock} {record.levelname.lower():<7} {_one_line(record.getMessage())}{fields}")
        if self._color and (color := _COLORS.get(record.levelname)):
            line = f"{color}{line}\x1b[0m"
        if record.exc_info:
            line += "\n" + escaped(self.formatException(record.exc_info))
        return line


class Sink(Protocol):
    """Destination of log lines."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...


class LogWriter(logging.Handler):
    """A handler with a queue, and a thread that empties it. A full queue drops the newest line and counts it."""

    def __init__(self, stream: Sink, formatter: logging.Formatter, queue_max: int = QUEUE_MAX) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0
        self._stream = stream
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(queue_max)
        self._thread = threading.Thread(target=self._run, name="mlxd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over one record, at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def stop(self, timeout_s: float = FLUSH_S) -> None:
        """Write what is queued, and give up on a pipe without a reader after `timeout_s`."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._stream.write(self.format(record) + "\n")
                if self._queue.empty():
                    self._stream.flush()
            except Exception:  # The root of this thread: a line that cannot be written is lost, the next one is not.
                self.dropped += 1


def dropped_records() -> int:
    """Lines lost because stderr or the file did not keep up, since the logs were configured."""
    handlers = logging.getLogger(OURS[0]).handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogWriter))


class LogSinks:
    """The configured logs: a context manager that puts the loggers back as they were."""

    def __init__(
        self, level: str = "info", *, json: bool | None = None, stream: TextIO | None = None, file: Sink | None = None
    ) -> None:
        """`level` in any case; `json` None means JSON unless stderr is a terminal. With a `file`, all goes there, and
        to stderr as well if it is a terminal. Raises ValueError."""
        if level.lower() not in LEVELS:
            raise ValueError(f"unknown log level {level!r}; one of {', '.join(LEVELS)}")
        target = stream or sys.stderr
        is_terminal = target.isatty()
        as_json = not is_terminal if json is None else json
        self.writer = LogWriter(target, JsonFormatter() if as_json else ConsoleFormatter(is_terminal))
        self._writers = [self.writer]
        if file is not None:
            if not is_terminal:
                self.writer.addFilter(_is_life_or_death)
            self._writers.append(LogWriter(file, JsonFormatter()))
        set_level(level)
        for name in OURS:
            logger = logging.getLogger(name)
            for writer in self._writers:
                logger.addHandler(writer)
            logger.propagate = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in OURS:
            logger = logging.getLogger(name)
            for writer in self._writers:
                logger.removeHandler(writer)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
        for writer in self._writers:
            writer.stop()


def escaped(text: str) -> str:
    """Text whose control characters a terminal shows instead of obeying; its lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def set_level(level: str) -> None:
    """From now on this one."""
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def _is_life_or_death(record: logging.LogRecord) -> bool:
    return record.name in LIFE or record.levelno >= logging.CRITICAL


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Fields that a caller passed as `extra={"fields": …}`."""
    return getattr(record, "fields", None) or {}


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text


def _one_line(text: str) -> str:
    # What a client or a worker wrote must not look like a line of ours.
    return text.replace("\r", "\\r").replace("\n", "\n    ")
