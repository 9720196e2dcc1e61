"""Queue of downloads. Each runs `mlxctl pull` in a child process, one at a time, and resumes partial files."""

import asyncio
import os
import secrets
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.errors import ApiError, Overloaded
from gateway.task_set import TaskSet

COMMAND: Final = (sys.executable, "-P", "-c", "from gateway.ctl import main; main()", "pull", "--yes", "--events", "--")
WAITING_MAX: Final = 16
ENDED_LISTED_MAX: Final = 20
SIGTERM_GRACE_S: Final = 5.0
# The download rate is averaged over this time.
RATE_SPAN_S: Final = 10.0
_ERROR_BYTES_MAX: Final = 4096

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class PullStatus(Struct, frozen=True):
    """One download. A `waiting` one is behind another. A `failed` or `cancelled` one keeps its partial files, which a
    new order resumes.

    `left_s` is None while the rate is unknown. `message` says how the download ended, and `path` is the finished
    folder.
    """

    id: str
    repository: str
    state: State
    downloaded_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    left_s: float | None = None
    message: str = ""
    path: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")


class PullEvent(Struct, frozen=True):
    """One line of the child's output: the progress, or at the end the model's folder."""

    downloaded_bytes: int = 0
    total_bytes: int = 0
    path: str = ""
    next_step: str = ""


_event: Final = msgspec.json.Decoder(PullEvent)


@dataclass(slots=True)
class _Download:
    """One ordered download. Only `PullQueue` changes it."""

    repository: str
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    state: State = "waiting"
    newest: PullEvent = field(default_factory=PullEvent)
    message: str = ""
    is_cancelled: bool = False
    process: Process | None = None
    # Times and received bytes of the newest events, from which the rate is computed.
    marks: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")

    def view(self) -> PullStatus:
        rate = self._rate() if self.state == "running" else 0.0
        left = self.newest.total_bytes - self.newest.downloaded_bytes
        return PullStatus(
            id=self.id,
            repository=self.repository,
            state=self.state,
            downloaded_bytes=self.newest.downloaded_bytes,
            total_bytes=self.newest.total_bytes,
            bytes_per_s=round(rate),
            left_s=round(left / rate) if rate > 0 else None,
            message=self.message,
            path=self.newest.path,
        )

    def add(self, event: PullEvent) -> None:
        self.newest = event
        now = time.monotonic()
        self.marks.append((now, event.downloaded_bytes))
        while now - self.marks[0][0] > RATE_SPAN_S:
            self.marks.popleft()

    def _rate(self) -> float:
        if len(self.marks) < 2:
            return 0.0
        (began, first), (ended, last) = self.marks[0], self.marks[-1]
        return max(0.0, (last - first) / (ended - began)) if ended > began else 0.0


class PullQueue:
    """Queue of downloads, first in, first out. Only the first unfinished download runs."""

    def __init__(self, tasks: TaskSet, home: Path) -> None:
        self._tasks = tasks
        self._home = home
        self._all: list[_Download] = []
        self._is_running = False

    def views(self) -> list[PullStatus]:
        """List all downloads, the newest last."""
        return [download.view() for download in self._all]

    def order(self, repository: str) -> PullStatus:
        """Queue a download. Raises `Overloaded`."""
        for download in self._all:
            if download.repository == repository and not download.has_ended:
                return download.view()
        if sum(not download.has_ended for download in self._all) > WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} downloads wait already.", 60.0)
        download = _Download(repository)
        self._all.append(download)
        ended = [each for each in self._all if each.has_ended]
        for each in ended[: len(ended) - ENDED_LISTED_MAX]:
            self._all.remove(each)
        if not self._is_running:
            self._is_running = True
            self._tasks.start(self._run(), "downloads")
        return download.view()

    def cancel(self, pull_id: str) -> PullStatus:
        """Stop a download. Its partial files stay. Raises `ApiError`."""
        download = next((each for each in self._all if each.id == pull_id), None)
        if download is None:
            raise ApiError(404, f"There is no download {pull_id[:40]!r}.", code="pull_not_found")
        if not download.has_ended:
            download.is_cancelled = True
            if download.process is None:
                _end(download, "cancelled", "It had not begun.")
            else:
                self._tasks.start(_stop(download.process), f"end of download {download.id}")
        return download.view()

    async def close(self) -> None:
        """Stop all downloads when the daemon ends."""
        for download in self._all:
            download.is_cancelled = True
            if download.process is not None:
                await _stop(download.process)

    async def _run(self) -> None:
        try:
            while (download := next((each for each in self._all if not each.has_ended), None)) is not None:
                await self._download(download)
        finally:
            self._is_running = False

    async def _download(self, download: _Download) -> None:
        if download.is_cancelled:
            _end(download, "cancelled", "It had not begun.")
            return
        download.state = "running"
        environ = os.environ | {"MLXD_HOME": str(self._home), "NO_COLOR": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, download.repository, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environ
            )
        except OSError as error:
            _end(download, "failed", f"mlxctl could not be started: {error.strerror or error}.")
            return
        download.process = process
        try:
            status, errors = await _follow(process, download)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            download.process = None
            if not download.has_ended:
                _end(download, "cancelled", "The server ends; what has come is kept.")
        if status == 0:
            _end(download, "done", download.newest.next_step)
        elif download.is_cancelled:
            _end(download, "cancelled", "What has come is kept: the next order resumes it.")
        else:
            _end(download, "failed", errors or f"mlxctl pull ended with status {status}.")


async def _follow(process: Process, download: _Download) -> tuple[int, str]:
    """Follow the child's output to its end; return its exit status and the end of its stderr."""
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.create_task(_tail(process.stderr))
    try:
        async for line in process.stdout:
            try:
                download.add(_event.decode(line))
            except msgspec.DecodeError:
                continue  # A library has written this line.
        status = await process.wait()
        errors = await reading
    finally:
        reading.cancel()
    return status, errors.removeprefix("mlxctl: ").strip()


async def _tail(stream: asyncio.StreamReader) -> str:
    """Return the last part of a stream. All of it is read, so that the writer never blocks."""
    end = b""
    while chunk := await stream.read(_ERROR_BYTES_MAX):
        end = (end + chunk)[-_ERROR_BYTES_MAX:]
    return end.decode(errors="replace")


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(SIGTERM_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()


def _end(download: _Download, state: State, message: str) -> None:
    download.state, download.message = state, message
