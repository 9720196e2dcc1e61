"""The log file: `mlxd.log` and a few older ones beside it, `mlxd.log.1` the newest of them. Written, read, followed."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 64 * 1024


class RotatingFile:
    """Written by one process, which holds the home's lock, in one thread.

    Unlike the standard library's handler it buffers nothing, so that a full disk loses lines and no memory, and it
    raises, so that the lost ones are counted.
    """

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep` older files stay. Raises `OSError`."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        self._forget()

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
        """Nothing waits."""

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        for number in range(self._keep - 1, -1, -1):
            with suppress(FileNotFoundError):
                nth(self._path, number).rename(nth(self._path, number + 1))
        if self._keep == 0:
            self._path.unlink(missing_ok=True)
        # Opened before the old one is closed: at no moment is there nothing to write to.
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh
        self._size = os.fstat(fresh).st_size

    def _forget(self) -> None:
        """Delete what an earlier, larger `keep` left."""
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            number = path.name.removeprefix(f"{self._path.name}.")
            if number.isdecimal() and int(number) > self._keep:
                path.unlink(missing_ok=True)


def nth(path: Path, number: int) -> Path:
    """The file itself, or the `number`th before it."""
    return path.with_name(f"{path.name}.{number}") if number else path


def last_lines(path: Path, count: int, wanted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """The last `count` lines that are wanted, of all the files together."""
    newest: deque[str] = deque(maxlen=count)
    for file in reversed(_files(path)):
        with suppress(FileNotFoundError), file.open(encoding="utf-8", errors="replace") as lines:
            newest.extend(line.rstrip("\n") for line in lines if line.endswith("\n") and wanted(line))
    return list(newest)


def follow(path: Path, wait: Callable[[], None]) -> Iterator[str]:
    """Every line that is written from now on, through any number of rotations. Calls `wait` when there is none."""
    return _follow(_Reader(path), wait)


def _follow(reader: "_Reader", wait: Callable[[], None]) -> Iterator[str]:
    try:
        while True:
            yield from reader.lines()
            if reader.is_newest():
                wait()
                continue
            # What was written between our last look and the renaming; after it, no process writes to that file.
            yield from reader.lines()
            if not reader.go_on():
                wait()
    finally:
        reader.close()


class _Reader:
    """Stays on its file, whatever that is called by now, until it is told to go on to the next newer one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._fd = -1
        with suppress(FileNotFoundError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """Whole lines written so far."""
        while self._fd >= 0 and (data := os.read(self._fd, _READ_BYTES)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def is_newest(self) -> bool:
        return self._number() == 0

    def go_on(self) -> bool:
        """Begin the next newer file; False if that cannot be told yet."""
        number = self._number()
        if number is None and self._is_there():
            return False  # being renamed right now
        files = _files(self._path)
        if number is None and not files:
            return False
        target = files[-1] if number is None else nth(self._path, number - 1)
        try:
            fresh = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if self._number() != number:
            # All were renamed meanwhile, the oldest first: what we opened may be one too new.
            os.close(fresh)
            return False
        self.close()
        self._fd, self._rest = fresh, b""
        return True

    def _is_there(self) -> bool:
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
    """The files that are there, the newest first; the very newest may be missing for a moment."""
    older: list[Path] = []
    while (file := nth(path, len(older) + 1)).exists():
        older.append(file)
    return [path, *older] if path.exists() else older
