"""Places from which the page is served: a name of the machine by plain HTTP, and below a path of a proxy."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.browser.conftest import SCRIPTED_DAEMON, Visiting
from tests.browser.test_access import make_key
from tests.browser.test_chat import told
from tests.browser.waiting import until
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home

# Chromium says so of every page that came by plain HTTP and not from this machine.
UNTRUSTED = ("Cross-Origin-Opener-Policy",)
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"}


def test_copy_works_by_plain_http_under_another_name(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",), server='hosts = ["evil.example"]')
        key = make_key(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            visit = visiting(f"http://evil.example:{port}", expected=(*UNTRUSTED, "status of 401"))
            page = visit.open()
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
            page.wait_for_selector("#message-box")
            assert page.evaluate("window.isSecureContext") is False
            code = "print('copied')"
            visit.send(json.dumps([["text", f"```python\n{code}\n```"], ["finish", "stop"]]))
            visit.answered()
            page.locator(".code-bar button").click()
            page.locator(".code-bar").get_by_role("status").filter(has_text="Copied").wait_for()
            page.locator("#message-box").focus()
            page.keyboard.press("Control+v")
            assert page.locator("#message-box").input_value() == code


@pytest.fixture(scope="module")
def below_a_path(talkative: DaemonProcess) -> Iterator[str]:
    """The address of a proxy that serves a daemon below `/x/`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(base_url=talkative.url, timeout=60) as client:
            app.state.client = client
            yield

    async def forward(request: Request) -> StreamingResponse:
        path = request.url.path.removeprefix("/x")
        # The daemon believes itself at its own address: a proxy's `Origin` is the page's.
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "origin")}
        target = f"{path}?{request.url.query}" if request.url.query else path
        client: httpx2.AsyncClient = request.app.state.client
        sent = client.build_request(request.method, target, headers=headers, content=await request.body())
        answer = await client.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOP - {"content-encoding"}}
        return StreamingResponse(body(), answer.status_code, kept)

    app = Starlette(routes=[Route("/x/{path:path}", forward, methods=["GET", "POST", "DELETE"])], lifespan=lifespan)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        server.should_exit = True
        thread.join()


def test_the_page_works_below_a_path_of_a_proxy(below_a_path: str, visiting: Visiting) -> None:
    visit = visiting(below_a_path)
    page = visit.open()
    visit.send(told(["text", "through a proxy"]))
    visit.answered()
    assert visit.said() == "through a proxy"
    page.reload()
    page.wait_for_selector(".message.assistant")

    assert visit.said() == "through a proxy"
    paths = page.evaluate("performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)")
    assert paths
    assert [path for path in paths if not path.startswith("/x/")] == []
