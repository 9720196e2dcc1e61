"""PDFs are read in processes that may be given anything, crash, hang and be killed."""

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

from gateway.errors import Unavailable
from gateway.media.documents import PROCESSES_OF_KEY_MAX, PageCache, PageCacheKey, PdfReader
from gateway.media.pdf_process import SIDE_MAX, PdfAnswer, PdfOrder, PdfPageContent, PdfPages, PdfRefusal
from protocol.codec import MAX_FRAME_BYTES
from tests.gateway.harness import until
from tests.support.pdfs import BLUE, PdfSheet, encrypted, pdf
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
TWO = pdf(PdfSheet("Hello\nWorld", "circle"), PdfSheet("", "square", BLUE))


def order(data: bytes, pictures_max: int | None = None, **limits: int) -> PdfOrder:
    bounds = {"pages_max": 100, "picture_max_pixels": 64_000_000, "cpu_max_s": 60, "answer_max_bytes": MAX_FRAME_BYTES}
    return PdfOrder(data, pictures_max=pictures_max, **bounds | limits)


async def read(data: bytes, pictures_max: int | None = None, **limits: int) -> PdfAnswer:
    return await PdfReader().read("", b"", order(data, pictures_max, **limits))


async def refusal(data: bytes, pictures_max: int | None = None, **limits: int) -> str:
    answer = await read(data, pictures_max, **limits)
    assert isinstance(answer, PdfRefusal)
    return answer.reason


def pretending(code: str) -> tuple[str, ...]:
    """A command that runs `code` in place of the process that reads a PDF."""
    return (sys.executable, "-c", code)


async def test_the_pages_are_in_order_with_their_texts_and_pictures() -> None:
    answer = await read(TWO, pictures_max=2)

    assert isinstance(answer, PdfPages)
    assert [page.text for page in answer.pages] == ["Hello\nWorld", ""]
    pictures = [Image.open(io.BytesIO(page.picture)) for page in answer.pages]
    assert [picture.size for picture in pictures] == [(SIDE_MAX, SIDE_MAX)] * 2
    red, blue = (picture.convert("RGB").getpixel((SIDE_MAX * 2 // 5, SIDE_MAX // 2)) for picture in pictures)
    assert isinstance(red, tuple)
    assert isinstance(blue, tuple)
    assert red[0] > 180 > red[2]
    assert blue[2] > 180 > blue[0]


async def test_the_same_file_gives_the_same_bytes() -> None:
    assert await read(TWO, pictures_max=2) == await read(TWO, pictures_max=2)


async def test_without_pictures_only_texts_are_read() -> None:
    assert await read(TWO) == await read(TWO)
    answer = await read(TWO)
    assert isinstance(answer, PdfPages)
    assert [(page.text, page.picture) for page in answer.pages] == [("Hello\nWorld", b""), ("", b"")]


@pytest.mark.parametrize("size", [(14400, 1), (1e9, 1e9), (1, 5000)])
async def test_a_page_of_any_size_gives_a_picture_of_bounded_size(size: tuple[float, float]) -> None:
    answer = await read(pdf(PdfSheet("x", size=size)), pictures_max=1)

    assert isinstance(answer, PdfPages)
    width, height = Image.open(io.BytesIO(answer.pages[0].picture)).size
    assert max(width, height) <= SIDE_MAX
    assert min(width, height) >= 56


async def test_a_picture_has_at_most_the_pixels_that_are_allowed() -> None:
    answer = await read(TWO, pictures_max=2, picture_max_pixels=10_000)
    assert isinstance(answer, PdfPages)
    width, height = Image.open(io.BytesIO(answer.pages[0].picture)).size
    assert width * height <= 10_201


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (encrypted(), "encrypted"),
        (TWO[:200], "no PDF that can be read"),
        (b"%PDF-1.7\n" + os.urandom(5000), "no PDF that can be read"),
        (b"%PDF-1.7\n" + b"<<" * 1_000_000, "no PDF that can be read"),
    ],
)
async def test_a_file_that_cannot_be_read_is_refused_with_the_reason(data: bytes, word: str) -> None:
    assert word in await refusal(data, pictures_max=4)


async def test_a_document_with_too_many_pages_is_refused_with_their_number() -> None:
    assert "it has 2 pages; at most 1" in await refusal(TWO, pages_max=1)
    assert "it has 2 pages, each of which the model also gets as a picture; 1 more" in await refusal(TWO, 1)


async def test_texts_and_pictures_are_bounded_together() -> None:
    assert "larger than 1000 bytes" in await refusal(TWO, 2, answer_max_bytes=1000)


# -- pages that are kept --------------------------------------------------------------------------------------------


async def test_a_pdf_is_read_again_only_for_another_key_or_form(tmp_path: Path) -> None:
    note = tmp_path / "runs"
    code = (
        f"import sys, msgspec; sys.stdin.buffer.read(); open({str(note)!r}, 'a').write('x'); "
        "sys.stdout.buffer.write(msgspec.msgpack.encode([1, [['text', b'']] * 3]))"
    )
    reader = PdfReader(pretending(code))
    asked = [("", b"d", None), ("", b"d", None), ("", b"d", 3), ("", b"d", 4), ("", b"e", None), ("other", b"d", None)]
    for owner, digest, pictures_max in asked:
        assert isinstance(await reader.read(owner, digest, order(TWO, pictures_max)), PdfPages)
    # Kept pages do not get around the limit of a request.
    await reader.read("", b"d", order(TWO, 2))

    assert note.read_text() == "x" * 5


def test_the_pages_used_last_are_kept() -> None:
    cache = PageCache(10)
    first, second, third = (PageCacheKey("", bytes([at]), False, 0) for at in range(3))
    pages = PdfPages([PdfPageContent("12345")])
    for key in (first, second):
        cache.keep(key, pages)
    assert cache.find(first) == pages
    cache.keep(third, pages)
    cache.keep(PageCacheKey("", b"large", False, 0), PdfPages([PdfPageContent("x" * 11)]))

    assert [cache.find(key) == pages for key in (first, second, third)] == [True, False, True]
    assert cache.size_bytes == 10


# -- processes that fail ---------------------------------------------------------------------------------------------


def sleeping(note: Path) -> tuple[str, ...]:
    """A command that notes its process id and never ends."""
    return pretending(f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")


async def noted(note: Path) -> int:
    """The process id, once it is noted."""
    await until(lambda: note.exists() and note.read_text() != "")
    return int(note.read_text())  # noqa: ASYNC240 - a short file


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 9)",
        "import os, sys; sys.stdin.buffer.read(); os.abort()",
        "import sys; sys.stdin.buffer.read(); print('nonsense')",
        "import sys; sys.stdin.buffer.read(); [sys.stdout.buffer.write(bytes(1 << 20)) for _ in range(1000)]",
    ],
)
async def test_a_process_that_crashes_is_a_refusal(code: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = PdfReader(pretending(code))
    answer = await reader.read("", b"", order(bytes(1_000_000), answer_max_bytes=1000))

    assert answer == PdfRefusal("reading it crashed; it is broken")
    assert "the process that read a PDF of 1000000 bytes failed" in caplog.text


async def test_a_process_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    # It has noted its id long before.
    reader = PdfReader(sleeping(note), read_max_s=patient(1))
    answer = await reader.read("", b"", order(TWO))

    assert isinstance(answer, PdfRefusal)
    assert "took longer than" in answer.reason
    assert not psutil.pid_exists(int(note.read_text()))


async def test_a_request_that_ends_ends_its_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    reading = asyncio.ensure_future(PdfReader(sleeping(note)).read("", b"", order(TWO)))
    pid = await noted(note)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading

    assert not psutil.pid_exists(pid)


async def test_a_killed_process_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    reading = asyncio.ensure_future(PdfReader(sleeping(note)).read("", b"", order(TWO)))
    os.kill(await noted(note), signal.SIGKILL)
    async with asyncio.timeout(patient(20)):
        assert await reading == PdfRefusal("reading it crashed; it is broken")
    assert isinstance(await read(TWO), PdfPages)


async def test_a_key_waits_for_its_own_documents_and_is_told_so_in_the_end() -> None:
    reader = PdfReader(pretending("import time; time.sleep(1000)"), wait_max_s=0.05)
    slow = [asyncio.ensure_future(reader.read("one", b"", order(TWO))) for _ in range(PROCESSES_OF_KEY_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as caught:
        await reader.read("one", b"", order(TWO))
    assert caught.value.code == "documents_waiting"
    other = asyncio.ensure_future(reader.read("other", b"", order(TWO)))
    await asyncio.sleep(0)
    assert not other.done()
    for each in (*slow, other):
        each.cancel()
    await asyncio.gather(*slow, other, return_exceptions=True)


async def test_the_process_knows_no_secrets_of_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = (
        "import os, sys, msgspec; sys.stdin.buffer.read(); "
        "sys.stdout.buffer.write(msgspec.msgpack.encode([2, ' '.join(os.environ)]))"
    )
    answer = await PdfReader(pretending(code)).read("", b"", order(TWO))

    assert isinstance(answer, PdfRefusal)
    assert "PATH" in answer.reason
    assert "HF_TOKEN" not in answer.reason
