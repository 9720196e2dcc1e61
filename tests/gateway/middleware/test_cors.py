from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gateway.access.key import Key, KeyFile
from gateway.config.origins import invalid_origin_reason, is_own
from gateway.config.settings import ServerConfig
from tests.gateway.harness import Gateway, chat, running

pytestmark = pytest.mark.anyio

PAGE = "https://app.example.com"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    """One that a page may use, and that asks for keys."""
    home = tmp_path_factory.mktemp("h")
    KeyFile(home / "keys" / "keys.json").create(Key(name="k", prefix="", salt="", hash=""))
    async with running(home, server=ServerConfig(cors=(PAGE,))) as running_gateway:
        yield running_gateway


def preflight(origin: str, headers: str = "authorization,content-type") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }


def told(headers: object) -> set[str]:
    return {name for name in headers if str(name).startswith("access-control-")}  # pyright: ignore


async def test_a_preflight_of_a_listed_page_needs_no_key(gateway: Gateway) -> None:
    answer = await gateway.client.options("/v1/chat/completions", headers=preflight(PAGE, "x-api-key, x-stainless-os"))

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == "x-api-key, x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example.com", "null", f"{PAGE}.evil.com", "http://app.example.com", f"{PAGE}:8443", "*"]
)
async def test_another_page_is_told_nothing(gateway: Gateway, origin: str) -> None:
    asked = await gateway.client.options("/v1/chat/completions", headers=preflight(origin))
    posted = await gateway.client.post("/v1/chat/completions", headers={"origin": origin}, json=chat())

    assert asked.status_code == posted.status_code == 401
    assert told(asked.headers) == told(posted.headers) == set()


async def test_a_listed_page_can_read_refusals_too(gateway: Gateway) -> None:
    answer = await gateway.client.post("/v1/chat/completions", headers={"origin": PAGE}, json=chat())

    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "retry-after" in answer.headers["access-control-expose-headers"]


async def test_a_header_list_that_is_none_is_not_repeated(gateway: Gateway) -> None:
    answer = await gateway.client.options("/v1/models", headers=preflight(PAGE, "a;b(c)"))

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type, x-api-key"


async def test_an_open_daemon_serves_programs_and_local_pages_but_no_page_of_the_web(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        for origin in ("http://localhost:3000", "http://127.0.0.1:8484", "http://[::1]", "vscode-webview://abc"):
            answer = await gateway.client.post("/v1/chat/completions", headers={"origin": origin}, json=chat())
            assert answer.status_code == 200, origin
            assert told(answer.headers) == set()
        for origin in ("https://evil.example.com", "http://evil.example.com:8484", "null", "http://127.0.0.1.evil.com"):
            headers = {"origin": origin, "content-type": "text/plain"}
            answer = await gateway.client.post("/v1/chat/completions", headers=headers, json=chat())
            assert answer.status_code == 403, origin
            assert told(answer.headers) == set()


async def test_a_listed_page_may_use_an_open_daemon(tmp_path: Path) -> None:
    async with running(tmp_path, server=ServerConfig(cors=(PAGE,))) as gateway:
        answer = await gateway.client.post("/v1/chat/completions", headers={"origin": PAGE}, json=chat())
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("origin", "is_good"),
    [
        ("https://app.example.com", True),
        ("http://10.0.0.5:3000", True),
        ("http://[::1]:3000", True),
        ("chrome-extension://abcdef", True),
        ("*", False),
        ("https://*.example.com", False),
        ("https://app.example.com/", False),
        ("https://App.example.com", False),
        ("https://app.example.com:443", False),
        ("http://app.example.com:80", False),
        ("app.example.com", False),
        ("null", False),
        ("", False),
    ],
)
def test_only_what_a_browser_sends_as_an_origin_can_be_configured(origin: str, is_good: bool) -> None:
    assert (invalid_origin_reason(origin) is None) is is_good


def test_odd_origins_are_nobodys_own() -> None:
    for origin in (
        "",
        "null",
        "http://",
        "http://[::1",
        "http://localhost.evil.com",
        "https://2130706433.com",
        "//localhost",
    ):
        assert not is_own(origin), origin
