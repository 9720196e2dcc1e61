"""Log file `mlxd.log` with its rotated files, of which `mlxd.log.1` is the newest: writing, reading, following."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

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
