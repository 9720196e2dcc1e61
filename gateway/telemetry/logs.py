"""Logs to stderr, as JSON lines or as text for a console, and to a file. A thread writes each, so that no caller waits.

Only the loggers of this project are configured, not those of libraries.

Lines of the JSON log file: decoding, and selection by model.

Log file `mlxd.log` with its rotated files, of which `mlxd.log.1` is the newest: writing, reading, following.
"""

import logging
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, Self, TextIO

import msgspec


def read_line(line: str) -> dict[str, Any] | None:
    """Decode a line into its fields; None if the line is no JSON object."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def is_about(line: str, model: str) -> bool:
    """Whether a line is about a request for the model, its worker or its supervisor."""
    fields = read_line(line)
    if fields is None:
        return False
    message = f" {fields.get('message', '')}"
    if fields.get("target") == model and str(fields.get("action", "")).startswith("model."):
        return True
    return fields.get("model") == model or f" {model}#" in message or f"model {model}:" in message


LOG_BYTES_MAX: Final = 16 * 1024 * 1024
OLDER_LOGS_MAX: Final = 8
_READ_BYTES: Final = 64 * 1024


class RotatingFile:
    """Log file of the process that holds the home's lock. Only one thread writes to it.

    Unlike the standard library's handler, it has no buffer, which would grow while the disk is full, and it raises
    errors, so that lost lines can be counted.
    """

    def __init__(self, path: Path, max_bytes: int = LOG_BYTES_MAX, keep: int = OLDER_LOGS_MAX) -> None:
        """`keep` is the number of rotated files. Raises `OSError`."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        self._delete_surplus()

    def write(self, text: str) -> None:
        """Append whole lines. Raises `OSError`."""
        data = text.encode(errors="replace")
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate()
        while data:
            count = os.write(self._fd, data)
            self._size += count
            data = data[count:]

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        for number in range(self._keep - 1, -1, -1):
            with suppress(FileNotFoundError):
                rotated_path(self._path, number).rename(rotated_path(self._path, number + 1))
        if self._keep == 0:
            self._path.unlink(missing_ok=True)
        # The new file is opened before the old one is closed, so that after a failure the old one can still be written.
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh
        self._size = os.fstat(fresh).st_size

    def _delete_surplus(self) -> None:
        """Delete the rotated files that exceed `keep`, which may have been larger before."""
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            number = path.name.removeprefix(f"{self._path.name}.")
            if number.isdecimal() and int(number) > self._keep:
                path.unlink(missing_ok=True)


def rotated_path(path: Path, number: int) -> Path:
    """Return the path of a rotated file; 1 is the newest rotated file, 0 the current file."""
    return path.with_name(f"{path.name}.{number}") if number else path


def last_lines(path: Path, count: int, wanted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the last `count` lines of all files for which `wanted` is true."""
    newest: deque[str] = deque(maxlen=count)
    for file in reversed(_files(path)):
        with suppress(FileNotFoundError), file.open(encoding="utf-8", errors="replace") as lines:
            newest.extend(line.rstrip("\n") for line in lines if line.endswith("\n") and wanted(line))
    return list(newest)


def follow(path: Path, wait: Callable[[], None]) -> Iterator[str]:
    """Yield lines that are written from now on, across rotations. Calls `wait` whenever there is no new line."""
    return _follow(_Follower(path), wait)  # The file is opened by this call, not when the first line is requested.


def _follow(reader: "_Follower", wait: Callable[[], None]) -> Iterator[str]:
    try:
        while True:
            yield from reader.lines()
            if reader.is_newest():
                wait()
                continue
            # Lines may have been written before the rotation, after which the file does not change.
            yield from reader.lines()
            if not reader.open_next():
                wait()
    finally:
        reader.close()


class _Follower:
    """Reader of one file. It continues after the file is renamed, until `open_next`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._fd = -1
        with suppress(FileNotFoundError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """Yield whole lines written so far."""
        while self._fd >= 0 and (data := os.read(self._fd, _READ_BYTES)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def is_newest(self) -> bool:
        return self._number() == 0

    def open_next(self) -> bool:
        """Open the next newer file. Return False if a rotation is not complete."""
        number = self._number()
        if number is None and self._exists():
            # Our file is gone from its path because a rotation is renaming it; the next call will find it.
            return False
        files = _files(self._path)
        if number is None and not files:
            return False
        target = files[-1] if number is None else rotated_path(self._path, number - 1)
        try:
            fresh = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if self._number() != number:
            # The files were rotated meanwhile, so the opened file may not be the next one.
            os.close(fresh)
            return False
        self.close()
        self._fd, self._rest = fresh, b""
        return True

    def _exists(self) -> bool:
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _number(self) -> int | None:
        if self._fd < 0:
            return None
        ours = os.fstat(self._fd)
        for file in _files(self._path):
            with suppress(FileNotFoundError):
                if os.path.samestat(file.stat(), ours):
                    return _number_of(file)
        return None


def _number_of(file: Path) -> int:
    return int(file.suffix[1:]) if file.suffix[1:].isdecimal() else 0


def _files(path: Path) -> list[Path]:
    """Return the existing files, the newest first. The current file may be missing during a rotation."""
    older: list[Path] = []
    while (file := rotated_path(path, len(older) + 1)).exists():
        older.append(file)
    return [path, *older] if path.exists() else older


# Loggers of this project. `worker` is for the output of worker processes.
OURS: Final = ("gateway", "worker", "mlxd")
QUEUE_MAX: Final = 10_000
FLUSH_S: Final = 2.0
# These loggers report start, reload and end. They also write to stderr if it is no terminal and there is a log file.
LIFECYCLE_LOGGERS: Final = ("gateway.daemon", "gateway.main", "gateway.workers.pool", "gateway.reload")
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
