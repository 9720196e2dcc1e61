"""Documents of a prompt. Each is replaced by the texts of its pages, and for a model with vision also by pictures.

Pages of the PDFs that were read last, so that each turn of a conversation does not read its PDF again.

Reads PDFs in processes of their own, which may crash, hang or be killed without harm to the daemon.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config.settings import MediaConfig
from gateway.errors import FULL_RETRY_AFTER_S, BadRequest, Unavailable
from gateway.media import read_media
from gateway.media.media_reference import DOCUMENT, IMAGE
from gateway.media.pdf_process import PdfAnswer, PdfOrder, PdfPageContent, PdfPages, PdfRefusal
from gateway.media.read_media import MediaLease, digest_of
from protocol.codec import MAX_FRAME_BYTES
from protocol.spec import IMAGE_PIXELS_MAX
from protocol.to_worker import ChatPrompt, Media

log = logging.getLogger(__name__)

CACHE_MAX_BYTES: Final = 64 * 1024 * 1024


class PageCacheKey(Struct, frozen=True):
    """Key of the pages of a PDF: everything that they depend on, and the API key, because keys share nothing."""

    owner: str
    digest: bytes
    has_pictures: bool
    picture_max_pixels: int


class PageCache:
    """Pages by what they depend on, the oldest use first. Used on the event loop only."""

    def __init__(self, max_bytes: int = CACHE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pages: OrderedDict[PageCacheKey, PdfPages] = OrderedDict()
        self.size_bytes = 0

    def find(self, key: PageCacheKey) -> PdfPages | None:
        pages = self._pages.get(key)
        if pages is not None:
            self._pages.move_to_end(key)
        return pages

    def keep(self, key: PageCacheKey, pages: PdfPages) -> None:
        """Keep pages, and drop those that were not used for longest. Pages larger than the cache are not kept."""
        if pages.size_bytes > self._max_bytes or key in self._pages:
            return
        self._pages[key] = pages
        self.size_bytes += pages.size_bytes
        while self.size_bytes > self._max_bytes:
            _, oldest = self._pages.popitem(last=False)
            self.size_bytes -= oldest.size_bytes


CHILD: Final = (sys.executable, "-P", "-m", "gateway.media.pdf_process")
# Maximum processes in total, and for one key. Further PDFs wait until a place is free.
PROCESSES_MAX: Final = 4
PROCESSES_OF_KEY_MAX: Final = 2
# A PDF waits at most this long for a process.
WAIT_MAX_S: Final = 60.0
# Maximum time of one process. Its CPU time has the same limit.
READ_MAX_S: Final = 60.0
# Bytes of an answer beside the texts and pictures of its pages.
_MARGIN_BYTES: Final = 1 << 20

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
                raise Unavailable(message, FULL_RETRY_AFTER_S, "documents_waiting") from None
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


# Maximum pages of one document. A model with vision takes fewer, because each page is also a picture.
PAGES_MAX: Final = 1000
PDF: Final = b"%PDF-"
# The marker of a PDF is in its first bytes, but not always at the very beginning.
PDF_MARKER_WITHIN: Final = 1024
# Text between two texts that are joined.
JOINT: Final = "\n\n"
NO_TEXT: Final = "(no text)"
NOT_SHOWN: Final = "PDF, not shown"


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """How the documents of one request are read. `has_vision` is whether the model takes images.

    `offload` runs expensive work on so many bytes in a thread.
    """

    settings: MediaConfig
    lease: MediaLease
    pdfs: PdfReader
    model: str
    has_vision: bool
    offload: Callable[[int, Callable[[], ChatPrompt]], Awaitable[ChatPrompt]]


def text_chars(prompt: ChatPrompt) -> int:
    """Return the length of all texts of the messages together."""
    contents = [message["content"] for message in prompt.messages]
    return sum(
        len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
        for content in contents
    )


def has_documents(prompt: ChatPrompt) -> bool:
    return any(each.kind == DOCUMENT for each in prompt.media)


def past_documents(prompt: ChatPrompt) -> frozenset[int]:
    """Return the indices of the documents before the newest message of the user.

    A client sends them again with each turn, so one that cannot be shown must not end the conversation: the model gets
    a note in its place.
    """
    asked = [index for index, message in enumerate(prompt.messages) if message["role"] == "user"]
    past = prompt.messages[: asked[-1] if asked else 0]
    parts = [part for message in past if not isinstance(message["content"], str) for part in message["content"]]
    return frozenset(part["media"] for part in parts if part["type"] == DOCUMENT)


async def with_pages(prompt: ChatPrompt, reading: DocumentReader) -> tuple[ChatPrompt, list[str]]:
    """Return the prompt with its documents replaced by their pages, and the paths of past documents that are not shown.

    Documents are read one after the other, so that a request that exceeds a limit ends early: first the current ones,
    then those of the past, the newest first, as long as there is room for their pictures. Raises `ApiError`.
    """
    pages: dict[int, list[PdfPageContent] | str] = {}
    past = past_documents(prompt)
    pictures = sum(each.kind != DOCUMENT for each in prompt.media)
    documents = [index for index, medium in enumerate(prompt.media) if medium.kind == DOCUMENT]
    for index in [*(at for at in documents if at not in past), *sorted(past, reverse=True)]:
        document = prompt.media[index]
        try:
            pages[index] = read = await _read(document, reading, read_media.COUNT_MAX - pictures)
            pictures += len(read)
        except _NotRead as error:
            if index not in past:
                raise BadRequest(f"'{document.param}': {error.reason}.", document.param, error.code) from None
            pages[index] = error.reason
    size = sum(len(page.picture) for read in pages.values() if not isinstance(read, str) for page in read)
    not_shown = [prompt.media[index].param for index in documents if isinstance(pages[index], str)]
    return await reading.offload(size, partial(_Rewrite(prompt.media, pages).prompt, prompt)), not_shown


class _NotRead(Exception):
    """Raised for a document that cannot be shown, with the reason."""

    def __init__(self, reason: str, code: str = "invalid_document") -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


async def _read(document: Media, reading: DocumentReader, pictures_max: int) -> list[PdfPageContent]:
    """Return the pages of a document. Raises `_NotRead`, and `Unavailable` if other documents take too long."""
    if not document.data:
        raise _NotRead("it could not be read")
    if PDF not in document.data[:PDF_MARKER_WITHIN]:
        raise _NotRead("it is no PDF; send other files as text or as images")
    order = PdfOrder(
        document.data,
        PAGES_MAX,
        pictures_max if reading.has_vision else None,
        IMAGE_PIXELS_MAX,
        reading.pdfs.cpu_max_s,
        MAX_FRAME_BYTES,
    )
    answer = await reading.pdfs.read(reading.lease.owner, document.digest, order)
    if not isinstance(answer, PdfPages):
        raise _NotRead(answer.reason, "too_many_media" if answer.has_too_many else "invalid_document")
    if not reading.has_vision and not any(page.text for page in answer.pages):
        count = len(answer.pages)
        reason = f"none of its {count} pages has text, as in a scan, and the model {reading.model!r} takes no images"
        raise _NotRead(reason, "unsupported_modality")
    reading.lease.grow(answer.size_bytes)
    return answer.pages


class _Rewrite:
    """Messages and media of a prompt while its documents are replaced.

    `pages` maps indices of `media` to pages, or to the reason why the document is not shown.
    """

    def __init__(self, media: Sequence[Media], pages: Mapping[int, list[PdfPageContent] | str]) -> None:
        self._old = media
        self._pages = pages
        self._new: list[Media] = []

    def prompt(self, prompt: ChatPrompt) -> ChatPrompt:
        messages = [self._message(message) for message in prompt.messages]
        return msgspec.structs.replace(prompt, messages=messages, media=tuple(self._new))

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return message
        parts: list[dict[str, Any]] = []
        for part in content:
            if part["type"] == DOCUMENT:
                self._add_pages(parts, part)
            elif "media" in part:
                parts.append(part | {"media": self._numbered(self._old[part["media"]])})
            else:
                _add_text(parts, part["text"])
        has_media = any("media" in part for part in parts)
        return message | {"content": parts if has_media else "".join(part["text"] for part in parts)}

    def _add_pages(self, parts: list[dict[str, Any]], part: dict[str, Any]) -> None:
        document, pages = self._old[part["media"]], self._pages[part["media"]]
        if part["heading"]:
            _add_text(parts, part["heading"])
        if isinstance(pages, str):
            _add_text(parts, f"[{NOT_SHOWN}: {pages}]")
            return
        for number, page in enumerate(pages, 1):
            text = page.text or ("" if page.picture else NO_TEXT)
            _add_text(parts, f"Page {number} of {len(pages)}:\n{text}".rstrip())
            if page.picture:
                picture = Media(IMAGE, digest_of(page.picture), page.picture, document.options, document.param)
                parts.append({"type": IMAGE, "media": self._numbered(picture)})

    def _numbered(self, medium: Media) -> int:
        self._new.append(medium)
        return len(self._new) - 1


def _add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Add a text, joined with the text before it if there is one."""
    if parts and parts[-1]["type"] == "text":
        text = parts.pop()["text"] + JOINT + text
    parts.append({"type": "text", "text": text})
