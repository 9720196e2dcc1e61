"""Reads PDFs in processes of their own, which may crash, hang or be killed without harm to the daemon."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from gateway.errors import Unavailable
from gateway.media.page_cache import PageCache, PageCacheKey
from gateway.media.pdf_process import PdfAnswer, PdfOrder, PdfPages, PdfRefusal

CHILD: Final = (sys.executable, "-P", "-m", "gateway.media.pdf_process")
# Maximum processes in total, and for one key. Further PDFs wait until a place is free.
PROCESSES_MAX: Final = 4
PROCESSES_OF_KEY_MAX: Final = 2
# A PDF waits at most this long for a process.
WAIT_MAX_S: Final = 60.0
# Maximum time of one process. Its CPU time has the same limit.
READ_MAX_S: Final = 60.0
RETRY_AFTER_S: Final = 2.0
# Bytes of an answer beside the texts and pictures of its pages.
_MARGIN_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)
_answer: Final = msgspec.msgpack.Decoder(PdfAnswer)


class _TooLong(Exception):
    """Raised if a process writes more than any answer has."""


class PdfReader:
    """Processes that read PDFs, and the pages that they have read last. Used on the event loop only."""

    def __init__(
        self, command: Sequence[str] = CHILD, read_max_s: float = READ_MAX_S, wait_max_s: float = WAIT_MAX_S
    ) -> None:
        self._command = command
        self._read_max_s = read_max_s
        self._wait_max_s = wait_max_s
        self._cache = PageCache()
        self._places = asyncio.Semaphore(PROCESSES_MAX)
        self._places_of: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(PROCESSES_OF_KEY_MAX)
        )

    @property
    def cpu_max_s(self) -> int:
        return max(1, int(self._read_max_s))

    async def read(self, owner: str, digest: bytes, order: PdfOrder) -> PdfAnswer:
        """Read a PDF, which has this digest, for a key. Raises `Unavailable` if other PDFs take too long."""
        key = PageCacheKey(owner, digest, order.pictures_max is not None, order.picture_max_pixels)
        pages = self._cache.find(key)
        if pages is not None and (order.pictures_max is None or len(pages.pages) <= order.pictures_max):
            return pages
        answer = await self._wait_and_run(owner, order)
        if isinstance(answer, PdfPages):
            self._cache.keep(key, answer)
        return answer

    async def _wait_and_run(self, owner: str, order: PdfOrder) -> PdfAnswer:
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._wait_max_s):
                    await held.enter_async_context(self._places_of[owner])
                    await held.enter_async_context(self._places)
            except TimeoutError:
                message = "Other PDFs are being read. Try again later."
                raise Unavailable(message, RETRY_AFTER_S, "documents_waiting") from None
            return await self._run(order)

    async def _run(self, order: PdfOrder) -> PdfAnswer:
        process = await self._start()
        try:
            async with asyncio.timeout(self._read_max_s):
                answer = await _exchange(process, msgspec.msgpack.encode(order), order.answer_max_bytes + _MARGIN_BYTES)
                await process.wait()
            return _answer.decode(answer)
        except TimeoutError:
            return PdfRefusal(f"reading it took longer than {self._read_max_s:g} seconds")
        except (_TooLong, msgspec.DecodeError):
            log.warning("the process that read a PDF of %d bytes failed (exit %s)", len(order.data), process.returncode)
            return PdfRefusal("reading it crashed; it is broken")
        finally:
            await _end(process)

    async def _start(self) -> Process:
        # The environment may have secrets, which are nothing for a process that reads a stranger's file.
        environ = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("PYTHON")}
        start = asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ)
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start that is cancelled may leave its process behind.
            await _end(await starting)
            raise


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        assert process.stdout is not None
        # A process has not ended for asyncio as long as its output is not read.
        while await process.stdout.read(1 << 20):
            pass
        await process.wait()


async def _exchange(process: Process, order: bytes, answer_max_bytes: int) -> bytes:
    """Write the order and read the answer, which ends when the process has closed its output."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(order)
    process.stdin.write_eof()
    pieces: list[bytes] = []
    size = 0
    while piece := await process.stdout.read(1 << 20):
        size += len(piece)
        if size > answer_max_bytes:
            raise _TooLong
        pieces.append(piece)
    return b"".join(pieces)
