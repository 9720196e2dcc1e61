"""The page over TCP: its files, its headers, and who is let in where."""

import gzip
import json
import logging
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gateway.access.key import Key, KeyFile
from gateway.config.address import Address
from gateway.config.settings import ServerConfig, UiConfig
from gateway.errors import ApiError
from gateway.request.record import RequestRecord
from gateway.state_dir import audit_path
from gateway.web.page import FOLDER, HEADERS, Page
from gateway.web.session import _is_here  # pyright: ignore[reportPrivateUsage]
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.web.visitors import api_routes, ask, code_of, log_in, own

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h")


@pytest.fixture(scope="module")
def secret(home: Path) -> str:
    """Of an admin key, the strongest that there is."""
    return KeyFile(home / "keys" / "keys.json").create(Key(name="boss", prefix="", salt="", hash="", is_admin=True))[1]


@pytest.fixture(scope="module")
async def gateway(home: Path, secret: str) -> AsyncGenerator[Gateway, None]:
    """One with a key, which captures requests."""
    server = ServerConfig(hosts=("studio.local",), capture=10)
    async with running(home, ["--step-ms", "1"], server=server) as running_gateway:
        running_gateway.app.services.throttle.per_minute = 1_000_000
        yield running_gateway


@pytest.fixture
def ui(gateway: Gateway) -> Generator[None, None, None]:
    """Puts `[ui]` back as it was."""
    live = gateway.app.services.live
    before = live.config
    yield
    live.apply(before)


def contents(home: Path) -> list[str]:
    """All that is written in a home."""
    return [file.read_text(errors="replace") for file in home.rglob("*") if file.is_file()]


def administer(gateway: Gateway, admin: str) -> None:
    live = gateway.app.services.live
    live.apply(structs.replace(live.config, ui=UiConfig(admin)))  # type: ignore[arg-type]


# -- files -----------------------------------------------------------------------------------------------------------


async def test_every_file_of_the_page_is_public_and_under_its_headers(gateway: Gateway) -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert files
    for file in files:
        answer = await gateway.client.get(f"/ui/{file.relative_to(FOLDER)}")
        assert answer.status_code == 200, file
        assert answer.content == file.read_bytes()
        for name, value in HEADERS:
            assert answer.headers[name.decode()] == value.decode()
        assert "set-cookie" not in answer.headers


async def test_the_page_runs_nothing_but_its_own_files_and_asks_no_other_server(gateway: Gateway) -> None:
    headers = (await gateway.client.get("/ui/")).headers

    assert headers["content-type"].startswith("text/html")
    assert headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"


async def test_files_are_compressed_and_a_copy_that_is_the_newest_is_not_sent_again(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with gateway.client.stream("GET", "/ui/", headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join([chunk async for chunk in answer.aiter_raw()])
        etag = answer.headers["etag"]
    index = (FOLDER / "index.html").read_bytes()
    assert (gzip.decompress(raw) if answer.headers.get("content-encoding") == "gzip" else raw) == index
    head = await gateway.client.head("/ui/", headers={"accept-encoding": "identity"})
    assert (head.content, head.headers["content-length"]) == (b"", str(len(index)))
    again = await gateway.client.get("/ui/", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["../page.py", "%2e%2e/page.py", "..%2fsession.py", "nope.js", "vendor", "%00", "/etc/passwd"]
)
async def test_nothing_beside_the_page_is_served(gateway: Gateway, path: str) -> None:
    request = gateway.client.build_request("GET", gateway.url + "/ui/" + path)
    assert (await gateway.client.send(request)).status_code in (401, 404)


async def test_a_file_that_changes_is_read_again_and_compressed_once(tmp_path: Path) -> None:
    script = tmp_path / "a.js"
    script.write_text("let a = 1;\n" * 500)
    (tmp_path / ".secret").write_text("x")

    async def get(name: str) -> tuple[int, bytes, dict[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "GET", "path": f"/ui/{name}", "headers": [(b"accept-encoding", b"gzip")],
            "mlxd.record": RequestRecord("r", "GET", "/"),
        }  # fmt: skip
        await page(scope, None, send)  # type: ignore[arg-type]
        return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])

    page = Page("/ui/", tmp_path)
    status, body, headers = await get("a.js")
    assert (status, headers[b"content-type"]) == (200, b"text/javascript; charset=utf-8")
    assert gzip.decompress(body) == script.read_bytes()
    assert (await get("a.js"))[1] is body
    script.write_text("let b = 2;\n" * 600)
    assert gzip.decompress((await get("a.js"))[1]) == script.read_bytes()
    for name in (".secret", "../a.js", "a.js/", "nope", "a" * 300):
        with pytest.raises(ApiError):
            await get(name)


@pytest.mark.parametrize("path", ["/", "/ui"])
async def test_a_browser_is_sent_to_the_page_below_whatever_path_it_came_by(gateway: Gateway, path: str) -> None:
    answer = await gateway.client.get(path, headers={"accept": "text/html,application/xhtml+xml"})

    assert (answer.status_code, answer.headers["location"]) == (303, "ui/")


async def test_a_program_that_asks_for_the_root_gets_what_it_always_got(gateway: Gateway, secret: str) -> None:
    assert (await gateway.client.get("/")).status_code == 401
    answer = await gateway.client.get("/", headers={"authorization": f"Bearer {secret}", "accept": "*/*"})
    assert answer.json()["name"] == "mlxd"


# -- who is let in ---------------------------------------------------------------------------------------------------


async def test_every_route_of_the_page_needs_a_session(gateway: Gateway) -> None:
    for method, path in api_routes(gateway):
        answer = await ask(gateway, method, path, own(gateway))
        is_log_in = (method, path) == ("POST", "/ui/api/session")
        assert answer.status_code == (400 if is_log_in else 401), (method, path)
        assert answer.headers["cache-control"] == "no-store"
        for wrong in ("mlxd-ui-wrong", "x" * 5000):
            headers = own(gateway, authorization=f"Bearer {wrong}")
            assert (await ask(gateway, method, path, headers)).status_code == (400 if is_log_in else 401), path


async def test_no_api_key_administers_an_admin_key_neither(gateway: Gateway, secret: str) -> None:
    for method, path in api_routes(gateway):
        if path in ("/ui/api/me", "/ui/api/session"):
            continue
        answer = await ask(gateway, method, path, own(gateway, authorization=f"Bearer {secret}"))
        assert answer.status_code == 403, (method, path)
    assert gateway.pool.worker("m").view().state == "stopped"


async def test_a_session_is_let_in_everywhere(gateway: Gateway) -> None:
    headers = await log_in(gateway)
    for method, path in api_routes(gateway):
        # The feed does not end, and the hub is another machine.
        if method == "GET" and not path.endswith("/feed") and "/hub/" not in path:
            answer = await ask(gateway, method, path, headers)
            assert answer.status_code not in (401, 403), (path, answer.text)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
async def test_a_token_in_the_hands_of_another_page_opens_nothing(
    gateway: Gateway, more: dict[str, str], status: int
) -> None:
    headers = await log_in(gateway)
    for method, path in [*api_routes(gateway), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")]:
        answer = await ask(gateway, method, path, headers | more)
        assert answer.status_code == status, (method, path)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_fetch_that_names_no_origin_must_be_of_the_page_itself(gateway: Gateway, site: str) -> None:
    headers = await log_in(gateway)
    del headers["origin"]

    assert (await gateway.client.get("/ui/api/status", headers=headers)).status_code == 200
    assert (await gateway.client.get("/ui/api/status", headers=headers | {"sec-fetch-site": site})).status_code == 403


async def test_the_page_is_served_under_this_machines_names_and_addresses_only(gateway: Gateway) -> None:
    for host in ("localhost", "127.0.0.1:1", "[::1]:8484", "10.1.2.3", "[fd00::1]", "STUDIO.local", "x.example"):
        answer = await gateway.client.get("/ui/", headers={"host": host})
        assert answer.status_code == (421 if host == "x.example" else 200), host
    assert "[server] hosts" in answer.text


async def test_a_form_of_another_page_cannot_order(gateway: Gateway) -> None:
    headers = await log_in(gateway)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = await gateway.client.post(
            "/ui/api/requests/cancel", content=b'{"id": "x"}', headers=headers | {"content-type": kind}
        )
        assert answer.status_code == 415, kind


async def test_a_preflight_of_the_pages_routes_allows_nothing(gateway: Gateway) -> None:
    live = gateway.app.services.live
    before = live.config
    origin = "https://app.example"
    live.apply(structs.replace(before, server=structs.replace(before.server, cors=(origin,))))
    try:
        headers = {"origin": origin, "access-control-request-method": "GET"}
        answer = await gateway.client.options("/ui/api/status", headers=headers)
    finally:
        live.apply(before)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


# -- logging in and out ----------------------------------------------------------------------------------------------


async def test_a_used_or_wrong_code_is_refused_with_advice(gateway: Gateway) -> None:
    code = code_of(gateway)
    first, second, wrong = [
        await gateway.client.post("/ui/api/session", json={"code": given}, headers=own(gateway))
        for given in (code, code, "nope")
    ]

    assert first.status_code == 200
    assert {answer.status_code for answer in (second, wrong)} == {403}
    assert "mlxctl ui" in second.json()["error"]["message"]


async def test_a_session_chats_without_an_api_key_and_ends_with_its_log_out(gateway: Gateway) -> None:
    headers = await log_in(gateway)

    assert (await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 200
    assert (await gateway.client.delete("/ui/api/session", headers=headers)).json() == {}
    assert (await gateway.client.get("/ui/api/status", headers=headers)).status_code == 401
    assert (await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/ui/api/session", {"POST", "DELETE"}),
        ("/ui/api/pulls", {"GET", "HEAD", "POST"}),
        ("/ui/api/feed", {"GET", "HEAD"}),
    ],
)
async def test_a_method_that_a_path_lacks_is_answered_with_all_that_it_has(
    gateway: Gateway, path: str, methods: set[str]
) -> None:
    answer = await gateway.client.put(path, json={}, headers=await log_in(gateway))

    assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, methods)


async def test_no_two_routes_share_a_path(gateway: Gateway) -> None:
    """Starlette's 405 answer lists the methods of the first one only."""
    paths = [route.path for route in (*gateway.app.routes, *gateway.app.backend.routes)]

    assert sorted({path for path in paths if paths.count(path) > 1}) == []


async def test_codes_and_tokens_are_in_no_log_no_capture_and_no_audit_line(
    gateway: Gateway, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = code_of(gateway)
    with caplog.at_level(logging.DEBUG, logger="gateway"):
        answer = await gateway.client.post("/ui/api/session", json={"code": code}, headers=own(gateway))
        token = answer.json()["token"]
        headers = own(gateway, authorization=f"Bearer {token}")
        await gateway.client.get("/ui/api/me", headers=headers)
        await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)
        listed = await gateway.client.get("/ui/api/requests?captured=1", headers=headers)
    captured = listed.json()["captured"]
    assert captured
    assert "/ui/api/session" not in {line["path"] for line in captured}
    audit = audit_path(home)
    await until(lambda: '"ui.login"' in audit.read_text())
    kept = contents(home)
    texts = [*kept, *(f"{line.getMessage()} {vars(line)}" for line in caplog.records)]
    assert not [text for text in texts if code in text or token in text]


async def test_the_page_learns_who_its_visitor_is(gateway: Gateway, secret: str) -> None:
    session = (await gateway.client.get("/ui/api/me", headers=await log_in(gateway))).json()
    key = (await gateway.client.get("/ui/api/me", headers={"authorization": f"Bearer {secret}"})).json()

    assert (session["visitor"], session["may_administer"], session["models"]) == ("session", True, ["m"])
    assert (key["visitor"], key["may_administer"], key["key"]) == ("key", False, "boss")
    assert key["usage"]["requests"] >= 0


async def test_on_an_open_loopback_the_visitor_chats_and_does_not_administer(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        me = (await gateway.client.get("/ui/api/me", headers=own(gateway))).json()
        status = await gateway.client.get("/ui/api/status", headers=own(gateway))
        rebound = await gateway.client.get("/", headers={"host": "evil.example", "accept": "text/html"})

    assert (me["visitor"], me["may_administer"], me["admin"]) == ("open", False, "loopback")
    assert status.status_code == 401
    assert rebound.status_code == 421


@pytest.mark.parametrize(
    ("client", "server", "is_here"),
    [
        (Address("127.0.0.1", 5), ("127.0.0.1", 8484), True),
        (Address("192.0.2.5", 5), ("192.0.2.5", 8484), True),
        (Address("192.0.2.6", 5), ("192.0.2.5", 8484), False),
        (Address("192.0.2.5", is_forwarded=True), ("192.0.2.5", 8484), False),
        (Address("127.0.0.1", 5, is_hidden=True), ("127.0.0.1", 8484), False),
        (Address("192.0.2.5", 5), None, False),
    ],
)
def test_a_client_is_on_this_machine_by_its_address(
    client: Address, server: tuple[str, int] | None, is_here: bool
) -> None:
    assert _is_here(client, {"server": server}) is is_here


# -- [ui] admin ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ui")
async def test_switched_off_no_session_is_opened_and_none_counts(gateway: Gateway, secret: str) -> None:
    headers = await log_in(gateway)
    administer(gateway, "off")

    refused = await gateway.client.get("/ui/api/status", headers=headers)
    assert refused.status_code == 403
    assert "[ui] admin" in refused.text
    log_in_again = await gateway.client.post("/ui/api/session", json={"code": code_of(gateway)}, headers=own(gateway))
    assert log_in_again.status_code == 403
    assert (await gateway.client.get("/ui/")).status_code == 200
    me = await gateway.client.get("/ui/api/me", headers={"authorization": f"Bearer {secret}"})
    assert me.json()["admin"] == "off"


@pytest.mark.usefixtures("ui")
async def test_another_machine_administers_only_where_the_network_may(gateway: Gateway) -> None:
    headers = await log_in(gateway) | {"x-forwarded-for": "192.0.2.7"}
    live = gateway.app.services.live
    proxied = structs.replace(live.config.server, trusted_proxies=("127.0.0.1",))
    live.apply(structs.replace(live.config, server=proxied))

    refused = await gateway.client.get("/ui/api/status", headers=headers)
    hidden = await gateway.client.get("/ui/api/status", headers=headers | {"x-forwarded-for": "unknown"})
    administer(gateway, "network")
    allowed = await gateway.client.get("/ui/api/status", headers=headers)

    assert (refused.status_code, hidden.status_code, allowed.status_code) == (403, 403, 200)
    assert json.loads(refused.text)["error"]["message"].endswith('set [ui] admin = "network".')
