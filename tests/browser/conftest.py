"""Fixtures of browser tests: Chromium, daemons, and pages that complain about nothing and ask no other server."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.browser.waiting import deadline_s
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

CHROMIUM: Final = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ROOT: Final = Path(__file__).parents[2]
SCREENSHOTS: Final = Path(os.environ.get("MLXD_SCREENSHOTS", ROOT / ".cache" / "web" / "screenshots"))
SCRIPTED_DAEMON: Final = "tests.browser.scripted_daemon"
WIDE: Final = {"width": 1280, "height": 800}

try:
    from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
except ImportError:
    collect_ignore_glob = ["test_*.py"]
    Browser = BrowserContext = Page = Any


def pytest_report_header() -> str:
    if CHROMIUM is None:
        return "browser: skipped, there is no Chromium: apt-get install --no-install-recommends chromium"
    return f"browser: {CHROMIUM}"


@dataclass
class Visit:
    """A page with what it complained about and which other servers it asked."""

    page: Page
    context: BrowserContext
    url: str
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on(
            "console",
            lambda message: self.complaints.append(f"{message.type}: {message.text} {message.location['url']}"),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("request", self._note)

    def _note(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(self.url).netloc:
            self.foreign.append(request.url)
        if request.method == "POST" and parts.path.startswith("/v1/") and request.post_data:
            self.bodies.append(json.loads(request.post_data))

    def open(self, place: str = "chat") -> Page:
        self.page.goto(f"{self.url}/ui/#/{place}")
        self.page.wait_for_selector("header.top")
        return self.page

    def send(self, text: str) -> None:
        box = self.page.locator("#message-box")
        box.fill(text)
        box.press("Enter")

    def answered(self, number: int = 1) -> None:
        """Waits until so many answers are whole, and none is being written."""
        self.page.wait_for_function(
            "number => document.querySelectorAll('.message.assistant > footer').length >= number"
            " && !document.querySelector('.round.stop')",
            arg=number,
        )

    def said(self) -> str:
        """The text of the last message."""
        return self.page.locator(".message").last.locator(".markdown").last.inner_text()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments.append("--host-resolver-rules=MAP evil.example 127.0.0.1")
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=patient(60) * 1000)
        yield running
        running.close()


@pytest.fixture(scope="session")
def talkative() -> Iterator[DaemonProcess]:
    """A daemon whose models say what they are told."""
    with short_home() as home:
        write_config(home, ("a", "b"))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            yield daemon


@pytest.fixture(scope="session")
def demo() -> Iterator[DaemonProcess]:
    """A daemon with the embedded model."""
    with short_home() as home:
        write_config(home, ("demo",), server='default = "demo"')
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon


Visiting = Callable[..., Visit]


@pytest.fixture
def visiting(browser: Browser) -> Iterator[Visiting]:
    """Opens contexts; at the end none of their pages may have complained, or asked another server."""
    with ExitStack() as stack:
        visits: list[Visit] = []

        def visit(daemon: DaemonProcess | str, *, expected: tuple[str, ...] = (), **options: Any) -> Visit:
            url = daemon if isinstance(daemon, str) else daemon.url
            context = browser.new_context(**({"viewport": WIDE, "locale": "en-GB"} | options))
            stack.callback(context.close)
            context.set_default_timeout(deadline_s() * 1000)
            opened = Visit(context.new_page(), context, url)
            opened.listen()
            visits.append(opened)
            stack.callback(lambda: check(opened, expected))
            return opened

        yield visit


def check(visit: Visit, expected: tuple[str, ...]) -> None:
    complaints = [text for text in visit.complaints if not any(part in text for part in expected)]
    assert complaints == []
    assert visit.foreign == []


def code_of(daemon: DaemonProcess) -> str:
    """A one-time link to the page, as `mlxctl ui --print` gets it."""
    transport = httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))
    with httpx2.Client(transport=transport, base_url="http://mlxd", timeout=deadline_s()) as client:
        answer = client.post("/v1/ui/code")
        assert answer.status_code == 200, answer.text
        return answer.json()["url"]
