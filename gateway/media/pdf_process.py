"""Process that reads one PDF: an order on stdin, the texts and pictures of its pages on stdout.

PDFs come from strangers and their library is native code, so it never runs in the daemon. This process has limits of
CPU time, memory and files, and may crash.
"""

import contextlib
import io
import resource
import sys
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

MEMORY_MAX_BYTES: Final = 4 * 1024**3
# A page is at most this many pixels wide or high: a letter of ten points has about 20 pixels on a sheet of A4.
SIDE_MAX: Final = 1568
# A picture's shorter side has at least this many pixels, so that every model takes it.
SIDE_MIN: Final = 56
JPEG_QUALITY: Final = 90
_DROPPED: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127, 65534, 65535))


class PdfOrder(Struct, frozen=True, array_like=True):
    """A PDF to read. With `pictures_max` None, only its text is read. `answer_max_bytes` bounds texts and pictures."""

    data: bytes
    pages_max: int
    pictures_max: int | None
    picture_max_pixels: int
    cpu_max_s: int
    answer_max_bytes: int


class PdfPageContent(Struct, frozen=True, array_like=True):
    """Text of a page, and its picture as a JPEG file, which is empty if pictures were not ordered."""

    text: str
    picture: bytes = b""


class PdfPages(Struct, frozen=True, array_like=True, tag=1):
    pages: list[PdfPageContent]

    @property
    def size_bytes(self) -> int:
        """Size of all texts and pictures."""
        return sum(len(page.text) + len(page.picture) for page in self.pages)


class PdfRefusal(Struct, frozen=True, array_like=True, tag=2):
    """Why a PDF is not read. `has_too_many` is true if it has more pages or pictures than are taken."""

    reason: str
    has_too_many: bool = False


PdfAnswer = PdfPages | PdfRefusal


def main() -> None:
    """Read the order, and write the answer."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PdfOrder)
    _limit(order.cpu_max_s)
    sys.stdout.buffer.write(msgspec.msgpack.encode(read(order)))


def read(order: PdfOrder) -> PdfAnswer:
    """Read all pages of a PDF."""
    from pypdfium2 import PdfDocument, PdfiumError
    from pypdfium2.raw import FPDF_ERR_PASSWORD

    try:
        document = PdfDocument(order.data)
    except PdfiumError as error:
        if getattr(error, "err_code", None) == FPDF_ERR_PASSWORD:
            return PdfRefusal("it is encrypted; send it without a password")
        return PdfRefusal("it is no PDF that can be read")
    with contextlib.closing(document):
        if (refusal := _refusal(len(document), order)) is not None:
            return refusal
        if order.pictures_max is not None:
            document.init_forms()
        try:
            return _pages(document, order)
        except PdfiumError:
            return PdfRefusal("one of its pages cannot be read")


def _refusal(pages: int, order: PdfOrder) -> PdfRefusal | None:
    if not pages:
        return PdfRefusal("it has no pages")
    if pages > order.pages_max:
        return PdfRefusal(f"it has {pages} pages; at most {order.pages_max} are taken", has_too_many=True)
    if order.pictures_max is not None and pages > order.pictures_max:
        reason = (
            f"it has {pages} pages, each of which the model also gets as a picture; {order.pictures_max} more pictures "
            "are taken in this request"
        )
        return PdfRefusal(reason, has_too_many=True)
    return None


def _pages(document: "PdfDocument", order: PdfOrder) -> PdfAnswer:
    pages: list[PdfPageContent] = []
    size = 0
    for index in range(len(document)):
        with contextlib.closing(document[index]) as page:
            picture = b"" if order.pictures_max is None else _picture(page, order.picture_max_pixels)
            pages.append(PdfPageContent(_text(page), picture))
        size += len(pages[-1].text) + len(picture)
        if size > order.answer_max_bytes:
            return PdfRefusal(f"the texts and pictures of its pages are larger than {order.answer_max_bytes} bytes")
    return PdfPages(pages)


def _text(page: "PdfPage") -> str:
    with contextlib.closing(page.get_textpage()) as text:
        found = text.get_text_range()
    lines = found.replace("\r\n", "\n").translate(_DROPPED).encode(errors="ignore").decode().split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def _picture(page: "PdfPage", max_pixels: int) -> bytes:
    """Render a page. Its size in the file only decides its shape, because it may be anything."""
    width, height = (max(side, 1.0) for side in page.get_size())
    scale = min(SIDE_MAX / max(width, height), (max_pixels / (width * height)) ** 0.5)
    image = page.render(scale=scale, draw_annots=True).to_pil().convert("RGB")
    if min(image.size) < SIDE_MIN:
        image = image.resize((max(image.width, SIDE_MIN), max(image.height, SIDE_MIN)))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def _limit(cpu_max_s: int) -> None:
    """Limit what a hostile PDF can use. macOS has no limit of memory."""
    limits = [(resource.RLIMIT_CPU, cpu_max_s)]
    # It writes no files and starts no processes.
    limits += [(limit, 0) for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC)]
    if sys.platform == "linux":
        limits.append((resource.RLIMIT_AS, MEMORY_MAX_BYTES))
    for limit, value in limits:
        # The operator's own limit may be lower.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    main()
