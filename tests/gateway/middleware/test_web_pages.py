"""Pages of the web in a browser of this machine, against an open loopback and against one with keys."""

import asyncio
import http.client
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from msgspec import structs

from gateway.access.key import Key, KeyFile
from gateway.config.origins import invalid_host_reason, is_served
from gateway.config.settings import ServerConfig
from tests.gateway.harness import Gateway, chat, running
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# As Chrome sends them.
SAME_ORIGIN = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}


class Rebound(http.client.HTTPConnection):
    """Connection of a page whose host's owner has made the name resolve to the loopback."""

    def connect(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=patient(60))


async def ask_as_page(gateway: Gateway, host: str, path: str) -> tuple[int, str]:
    """Send the GET of a page of `http://HOST:PORT` to its own origin, which names no origin."""

    def ask() -> tuple[int, str]:
        connection = Rebound(host, gateway.port)
        try:
            connection.request("GET", path, headers=SAME_ORIGIN)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    """An open one, with one name beside the loopback's."""
    home = tmp_path_factory.mktemp("h")
    async with running(home, ["--step-ms", "1"], server=ServerConfig(hosts=("studio.local",))) as running_gateway:
        yield running_gateway


async def test_a_page_whose_name_resolves_to_the_loopback_reads_nothing(gateway: Gateway) -> None:
    made = await gateway.client.post("/v1/responses", json={"model": "m", "input": "a secret", "max_output_tokens": 1})
    stored = f"/v1/responses/{made.json()['id']}"
    generated = gateway.metrics.model("m").generation_tokens
    paths = ("/v1/models", "/metrics", stored, f"{stored}/input_items", "/health?deep=1", "/livez", "/", "/nope")
    for path in paths:
        status, text = await ask_as_page(gateway, "attacker.example", path)
        assert (status, "[server] hosts" in text) == (421, True), path
        assert "secret" not in text
        status, _ = await ask_as_page(gateway, "localhost", path)
        assert status == (404 if path == "/nope" else 200), path
    assert gateway.metrics.auth_failures["host"] == len(paths)
    # The owner's own deep health is the one token.
    assert gateway.metrics.model("m").generation_tokens <= generated + 1


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/v1/responses/resp_1/input_items", "/health?deep=1", "/livez", "/"]
)
async def test_a_foreign_page_fetches_nothing_by_an_image_or_a_link(gateway: Gateway, path: str) -> None:
    for site in ("cross-site", "same-site"):
        answer = await gateway.client.get(path, headers=IMAGE | {"sec-fetch-site": site})
        assert answer.status_code == 403, site
        assert "[server] cors" in answer.text
    foreign = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert (await gateway.client.get(path, headers=foreign)).status_code == 403


async def test_a_refused_host_is_told_in_the_dialect_that_was_asked(gateway: Gateway) -> None:
    headers = {"host": "attacker.example"}
    openai = await gateway.client.post("/v1/chat/completions", headers=headers, json=chat())
    anthropic = await gateway.client.post("/v1/messages", headers=headers, json={})

    assert openai.json()["error"]["code"] == "unknown_host"
    assert anthropic.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("headers", [SAME_ORIGIN, {"sec-fetch-site": "none"}, {}])
async def test_programs_and_the_address_bar_may_use_an_open_loopback(gateway: Gateway, headers: dict[str, str]) -> None:
    assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
    assert (await gateway.client.post("/v1/chat/completions", headers=headers, json=chat())).status_code == 200


async def test_our_own_page_may_post_under_each_name_that_is_served(gateway: Gateway) -> None:
    async def post(host: str, origin: str) -> int:
        headers = {"host": host, "origin": origin, "sec-fetch-site": "same-origin"}
        return (await gateway.client.post("/v1/chat/completions", headers=headers, json=chat())).status_code

    assert await post("studio.local:8484", "http://studio.local:8484") == 200
    assert await post("studio.local", "https://STUDIO.local") == 200
    # Another port is another page, and a name that is not served is none of ours.
    assert await post("studio.local:8484", "http://studio.local:9") == 403
    assert await post("localhost:8484", "http://studio.local:8484") == 403
    assert await post("evil.example", "http://evil.example") == 421


async def test_a_page_of_this_machine_on_another_port_may_use_an_open_loopback(gateway: Gateway) -> None:
    headers = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
    assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("host", ["studio.local", "STUDIO.local:8484", "studio.local.:80", "127.1.2.3", "[::1]:9"])
async def test_names_of_this_machine_are_served(gateway: Gateway, host: str) -> None:
    assert (await gateway.client.get("/livez", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "studio.local.evil.example", "xstudio.local", "localhost.evil.example", "10.0.0.5", "0.0.0.0",
     "[fd00::1]", "[::1", "::1", "localhost@evil.example", "localhost:80:80", "127.0.0.1,evil.example", ""],
)  # fmt: skip
async def test_other_names_are_not(gateway: Gateway, host: str) -> None:
    assert (await gateway.client.get("/livez", headers={"host": host})).status_code == 421


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /livez HTTP/1.0\r\n\r\n", b" 200 "),
        (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", b" 421 "),
    ],
)
async def test_a_client_that_names_no_host_is_no_page_and_one_foreign_name_of_two_is_one(
    gateway: Gateway, head: bytes, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(head)
    line = await asyncio.wait_for(reader.readline(), patient(60))
    writer.close()
    assert status in line


async def test_with_keys_a_name_is_checked_only_where_names_are_listed(tmp_path: Path) -> None:
    _, secret = KeyFile(tmp_path / "keys" / "keys.json").create(Key(name="k", prefix="", salt="", hash=""))
    async with running(tmp_path) as gateway:
        headers = {"host": "any.example", "authorization": f"Bearer {secret}"}
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await gateway.client.get("/v1/models", headers={"host": "any.example"})).status_code == 401

        live = gateway.app.services.live
        live.apply(structs.replace(live.config, server=structs.replace(live.config.server, hosts=("a.example",))))
        refused = await gateway.client.get("/v1/models", headers=headers)
        assert refused.status_code == 421
        assert "keys create" not in refused.text
        assert (await gateway.client.get("/v1/models", headers=headers | {"host": "a.example:1"})).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
async def test_the_api_and_the_page_accept_and_refuse_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac-7.local")
    accepted = ["localhost", "127.0.0.1:1", "[::1]:8484", address, "STUDIO.lan:8484", "studio.lan."]
    refused = ["evil.example", "mac-7.evil.example", "mac-7.localx", "mac-8.local", "xstudio.lan", "lan", "[::1", ""]
    # On a loopback only a page that was resolved there, or a proxy, uses the machine's name.
    (refused if address == "127.0.0.1" else accepted).extend(["mac-7", "MAC-7.local:8484", "mac-7.local."])

    async with running(tmp_path, server=ServerConfig(host=address, hosts=("studio.lan",))) as gateway:
        for host in (*accepted, *refused):
            headers = {"host": host}
            api, page = [(await gateway.client.get(path, headers=headers)).status_code for path in ("/livez", "/ui/")]
            assert (api, page) == ((200, 200) if host in accepted else (421, 421)), host


def test_the_configured_host_is_served_also_where_it_is_a_name() -> None:
    assert is_served("studio.lan:8484", ("studio.lan",))
    assert not is_served("studio.lan:8484", ("127.0.0.1",))


def test_a_host_is_a_bare_name_or_address() -> None:
    assert [invalid_host_reason(host) for host in ("studio.local", "mac_1", "10.0.0.5", "[fd00::1]")] == [None] * 4
    for bad in ("", "Studio.local", "http://studio.local", "studio.local:8484", "a/b", "a b", "*.local", ".local", "é"):
        assert invalid_host_reason(bad), bad
