"""Documents of a prompt. Each is replaced by the texts of its pages, and for a model with vision also by pictures."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from gateway.config.settings import MediaConfig
from gateway.errors import BadRequest
from gateway.media.base64_data import invalid
from gateway.media.in_flight_bytes import MediaLease
from gateway.media.pdf_process import PdfOrder, PdfPageContent, PdfPages
from gateway.media.pdf_reader import PdfReader
from gateway.media.reference import DOCUMENT, IMAGE
from gateway.media.resolve import digest_of
from protocol.codec import MAX_FRAME_BYTES
from protocol.prompts import ChatPrompt, Media

# Maximum pages of one document. A model with vision takes fewer, because each page is also a picture.
PAGES_MAX: Final = 1000
PDF: Final = b"%PDF-"
# The marker of a PDF is in its first bytes, but not always at the very beginning.
PDF_MARKER_WITHIN: Final = 1024
# Text between two texts that are joined.
JOINT: Final = "\n\n"
NO_TEXT: Final = "(no text)"


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


async def with_pages(prompt: ChatPrompt, reading: DocumentReader) -> ChatPrompt:
    """Return the prompt with its documents replaced by their pages. Raises `ApiError`.

    Documents are read one after the other, so that a request that exceeds a limit ends early.
    """
    pages: dict[int, list[PdfPageContent]] = {}
    pictures = sum(each.kind != DOCUMENT for each in prompt.media)
    for index, medium in enumerate(prompt.media):
        if medium.kind == DOCUMENT:
            pages[index] = await _read(medium, reading, reading.settings.max_count - pictures)
            pictures += len(pages[index])
    size = sum(len(page.picture) for read in pages.values() for page in read)
    return await reading.offload(size, partial(_Rewrite(prompt.media, pages).prompt, prompt))


async def _read(document: Media, reading: DocumentReader, pictures_max: int) -> list[PdfPageContent]:
    if PDF not in document.data[:PDF_MARKER_WITHIN]:
        raise invalid(document, "it is no PDF; send other files as text or as images")
    order = PdfOrder(
        document.data,
        PAGES_MAX,
        pictures_max if reading.has_vision else None,
        reading.settings.max_pixels,
        reading.pdfs.cpu_max_s,
        MAX_FRAME_BYTES,
    )
    answer = await reading.pdfs.read(reading.lease.owner, document.digest, order)
    if not isinstance(answer, PdfPages):
        if answer.has_too_many:
            raise BadRequest(f"'{document.param}': {answer.reason}.", document.param, "too_many_media")
        raise invalid(document, answer.reason)
    if not reading.has_vision and not any(page.text for page in answer.pages):
        message = (
            f"'{document.param}': none of its {len(answer.pages)} pages has text, as in a scan, and the model "
            f"{reading.model!r} takes no images."
        )
        raise BadRequest(message, document.param, "unsupported_modality")
    reading.lease.grow(answer.size_bytes)
    return answer.pages


class _Rewrite:
    """Messages and media of a prompt while its documents are replaced. `pages` maps indices of `media` to pages."""

    def __init__(self, media: Sequence[Media], pages: Mapping[int, list[PdfPageContent]]) -> None:
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
