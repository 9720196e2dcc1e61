"""The animation of a worker that is killed amid an answer: the demo model in its process, and a page that goes on."""

import io
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import matplotlib
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.browser.conftest import SCREENSHOTS, Visiting
from tests.browser.waiting import deadline_s
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home

SIZE: Final = {"width": 760, "height": 470}
FRAME_S: Final = 0.02
# The kill, at this number of the count.
KILLED_AT: Final = 24
LAST: Final = 80
ROW: Final = 26
BYTES_MAX: Final = 600_000
FONT: Final = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf"


def drawn(screenshot: bytes, lines: list[str]) -> Image.Image:
    """Return a picture of the page above what a terminal shows."""
    page = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture = Image.new("RGB", (page.width, page.height + 3 * ROW + 12), "#1e1e1c")
    picture.paste(page)
    draw, font = ImageDraw.Draw(picture), ImageFont.truetype(str(FONT), 15)
    for at, line in enumerate(lines):
        color = "#e0a58a" if line.startswith("$") else "#c9c7c0"
        draw.text((16, page.height + 8 + at * ROW), line, fill=color, font=font)
    return picture.quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)


@pytest.fixture
def demo() -> Iterator[DaemonProcess]:
    """A daemon whose demo model says the same each time."""
    with short_home() as home:
        write_config(home, ("demo",), model="sampling = { temperature = 0 }")
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon


def test_an_answer_goes_on_at_the_next_number(demo: DaemonProcess, visiting: Visiting) -> None:
    demo.complete("hi", "demo")
    (first,) = demo.worker_pids()
    visit = visiting(demo, viewport=SIZE, color_scheme="light")
    page = visit.open()
    visit.send(f"List the numbers from 1 to {LAST}.")

    frames: list[tuple[float, Image.Image]] = []
    lines, end = [f"worker of demo: process {first}"], time.monotonic() + deadline_s()
    while True:
        frames.append((time.monotonic(), drawn(page.screenshot(), lines)))
        numbers = [int(each) for each in re.findall(r"\d+", page.locator(".message").last.inner_text().split("#")[0])]
        if len(lines) == 1 and KILLED_AT in numbers:
            os.kill(first, signal.SIGKILL)
            lines.append(f"$ kill -9 {first}")
        if len(lines) == 2 and (pids := [pid for pid in demo.worker_pids() if pid not in (0, first)]):
            lines.append(f"worker of demo: process {pids[0]}")
        if page.locator(".message.assistant > footer").count():
            break
        assert time.monotonic() < end
        page.wait_for_timeout(1000 * FRAME_S)

    assert visit.said() == ", ".join(map(str, range(1, LAST + 1)))
    assert len(lines) == 3, "another process has gone on"
    times = [at for at, _ in frames]
    shown_ms = [max(60, min(500, round(1000 * (after - at)))) for at, after in itertools.pairwise(times)]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    file = SCREENSHOTS / "killed-worker.gif"
    pictures = [picture for _, picture in frames]
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=[*shown_ms, 3000], loop=0, optimize=True)
    assert file.stat().st_size < BYTES_MAX
