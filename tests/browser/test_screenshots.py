"""Screenshots of chat and dashboard, into `.cache/web/screenshots`, or the folder that MLXD_SCREENSHOTS names."""

import io
import json
import os
import threading
from collections.abc import Iterator

import httpx2
import pytest
from PIL import Image

from tests.browser.conftest import SCREENSHOTS, SCRIPTED_DAEMON, Visit, Visiting, code_of
from tests.browser.waiting import deadline_s
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home

SIZE = {"width": 1200, "height": 780}
BYTES_MAX = 80_000
# Seconds of work that the charts show: more of it in the pictures of the documentation.
POINTS = 25 if "MLXD_SCREENSHOTS" in os.environ else 4
ANSWER = """A Bloom filter answers *"have I seen this?"* with a bit array and $k$ hash functions. It may say **yes** by
mistake, never **no**. With $n$ items in $m$ bits, a wrong yes has the probability

$$p \\approx \\left(1 - e^{-kn/m}\\right)^k$$

```python
class BloomFilter:
    def __init__(self, bits: int, hashes: int) -> None:
        self.bits, self.hashes = bytearray(bits // 8), hashes

    def add(self, item: bytes) -> None:
        for place in self._places(item):
            self.bits[place // 8] |= 1 << place % 8
```

| bits per item | hash functions | wrong yes |
|---:|---:|---:|
| 8 | 6 | 2.2 % |
| 16 | 11 | 0.05 % |
"""


@pytest.fixture(scope="module")
def studio() -> Iterator[DaemonProcess]:
    """A daemon with models that are named like those of a person, and that work for a while."""
    with short_home() as home:
        write_config(home, ("coder", "small", "vision"))
        (home / "mlxd.toml").write_text(f'{(home / "mlxd.toml").read_text()}\n[memory]\nbudget = "3GiB"\n')
        with DaemonProcess(home, "talkative", "--step-ms=9", module=SCRIPTED_DAEMON) as daemon:
            for model, mebibytes in ("coder", 900), ("small", 320):
                daemon.complete(f"grow {mebibytes}", model)
            yield daemon


def keep(visit: Visit, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    file = SCREENSHOTS / f"{name}.png"
    picture = Image.open(io.BytesIO(visit.page.screenshot())).convert("RGB")
    # A page has few colours.
    picture.quantize(128, method=Image.Quantize.MEDIANCUT).save(file, optimize=True)
    assert 5_000 < file.stat().st_size < BYTES_MAX


def answer(visit: Visit) -> None:
    events = [["reasoning", "The user wants a formula."], *(["wait"] for _ in range(40)), ["text", ANSWER]]
    # Typed is what the model is told; shown is what a person would have asked.
    visit.send(json.dumps([*events, ["finish", "stop"]]))
    visit.answered()
    visit.page.wait_for_selector(".row:not(:has(.pulse))", state="attached")
    visit.page.wait_for_timeout(300)
    visit.page.evaluate(
        """async () => {
          const { open, list } = await import("./chat/conversations.js");
          const message = [...open.value.messages.values()].find((each) => each.role === "user");
          const text = "How does a Bloom filter work, and how wrong is it?";
          const messages = new Map(open.value.messages).set(message.id, { ...message, text });
          open.value = { ...open.value, messages };
          const others = ["Parse log lines with awk", "Tax table as types", "Names for a sailing boat"];
          const [first] = list.value, now = Date.now(), day = 86400000;
          list.value = [{ ...first, title: "A Bloom filter" }, ...others.map((title, at) => (
            { ...first, id: title, title, updated: now - (at ? at * day : 60000) }))];
        }"""
    )
    visit.page.wait_for_selector(".hljs-keyword")
    visit.page.wait_for_selector("math mfrac, math mo")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chat(studio: DaemonProcess, visiting: Visiting, theme: str) -> None:
    visit = visiting(studio, viewport=SIZE, color_scheme=theme)
    visit.open()
    answer(visit)
    visit.page.locator(".scroll").evaluate("each => each.scrollTo(0, 0)")
    visit.page.mouse.move(5, 400)

    keep(visit, f"chat-{theme}")


def test_chat_on_a_phone(studio: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(studio, viewport={"width": 390, "height": 780}, color_scheme="dark")
    visit.open()
    answer(visit)
    visit.page.locator(".scroll").evaluate("each => each.scrollTo(0, 0)")

    keep(visit, "chat-phone")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dashboard(studio: DaemonProcess, visiting: Visiting, theme: str) -> None:
    visit = visiting(studio, viewport=SIZE, color_scheme=theme)
    stop = threading.Event()
    threads = [threading.Thread(target=load, args=(studio.url, name, stop), daemon=True) for name in ("coder", "small")]
    for thread in threads:
        thread.start()
    try:
        visit.page.goto(code_of(studio))
        visit.page.wait_for_selector(".card:has-text('ready')")
        # Points come once a second.
        visit.page.wait_for_function(_CHARTED, arg=POINTS, polling=500, timeout=(POINTS + deadline_s()) * 1000)
        keep(visit, f"models-{theme}")
        visit.page.goto(f"{visit.url}/ui/#/requests")
        visit.page.wait_for_selector("tbody tr")
        keep(visit, f"requests-{theme}")
    finally:
        stop.set()
        for thread in threads:
            thread.join(deadline_s())
        assert not any(thread.is_alive() for thread in threads)


_CHARTED = """async (points) => {
  const { sessionJson } = await import("./server/session.js");
  const { models } = await sessionJson("history");
  return ["coder", "small"].every((name) => models[name].tokens_per_s.filter((number) => number > 0).length >= points);
}"""


def load(url: str, model: str, stop: threading.Event) -> None:
    """Requests of a model, one after the other."""
    with httpx2.Client(base_url=url, timeout=deadline_s()) as client:
        while not stop.is_set():
            body = {"model": model, "messages": [{"role": "user", "content": "count"}], "max_tokens": 150}
            client.post("/v1/chat/completions", json=body)
