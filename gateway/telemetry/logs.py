"""Logs to stderr, as JSON lines or as text for a console, and to a file. A thread writes each, so that no caller waits.

Only the loggers of this project are configured, not those of libraries.
"""

import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self, TextIO

import msgspec

# Loggers of this project. `worker` is for the output of worker processes.
OURS: Final = ("gateway", "worker", "mlxd")
QUEUE_MAX: Final = 10_000
FLUSH_S: Final = 2.0
# These loggers report start, reload and end. They also write to stderr if it is no terminal and there is a log file.
LIFECYCLE_LOGGERS: Final = ("gateway.daemon", "gateway.main", "gateway.workers.pool.pool", "gateway.reload")
LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_COLORS: Final = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31;1m"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON, with its extra `fields`."""

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
    """Formats a record as a line for people, with colour on a terminal."""

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
    """Handler with a queue, which a thread writes to a sink. When the queue is full, new lines are dropped
    and counted.
    """

    def __init__(self, stream: Sink, formatter: logging.Formatter, queue_max: int = QUEUE_MAX) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0
        self._stream = stream
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(queue_max)
        self._thread = threading.Thread(target=self._run, name="mlxd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record without waiting."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def stop(self, timeout_s: float = FLUSH_S) -> None:
        """Write the queued records, but stop after about `timeout_s`, because a pipe may have no reader."""
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
            except Exception:  # The thread must go on after a failed write.
                self.dropped += 1


def dropped_records() -> int:
    """Return the number of lines that were dropped since the logs were configured."""
    handlers = logging.getLogger(OURS[0]).handlers
    return sum(handler.dropped for handler in handlers if isinstance(handler, LogWriter))


class LogSinks:
    """Context manager that configures the logs and restores the loggers at its end."""

    def __init__(
        self, level: str = "info", *, json: bool | None = None, stream: TextIO | None = None, file: Sink | None = None
    ) -> None:
        """Configure the logs. `json` None means JSON unless stderr is a terminal. With a `file`, all lines go to the
        file; stderr gets them only if it is a terminal, and else only lines about start, reload and end. Raises
        `ValueError`.
        """
        if level.lower() not in LEVELS:
            raise ValueError(f"unknown log level {level!r}; one of {', '.join(LEVELS)}")
        target = stream or sys.stderr
        is_terminal = target.isatty()
        as_json = not is_terminal if json is None else json
        self.writer = LogWriter(target, JsonFormatter() if as_json else ConsoleFormatter(is_terminal))
        self._writers = [self.writer]
        if file is not None:
            if not is_terminal:
                self.writer.addFilter(_is_lifecycle_or_critical)
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
    """Escape control characters, except newlines and tabs, so that a terminal does not interpret them."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def set_level(level: str) -> None:
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())


def _is_lifecycle_or_critical(record: logging.LogRecord) -> bool:
    return record.name in LIFECYCLE_LOGGERS or record.levelno >= logging.CRITICAL


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that were passed as `extra={"fields": …}`."""
    return getattr(record, "fields", None) or {}


def _plain(value: Any) -> str:
    text = _digits(value) if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text


def _digits(value: float) -> str:
    """Write a number with four digits or more, and without the exponent that `g` has from 10,000 on."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _one_line(text: str) -> str:
    # Newlines are escaped or indented, because text of a client or a worker must not look like another log line.
    return text.replace("\r", "\\r").replace("\n", "\n    ")
