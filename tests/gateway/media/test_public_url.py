"""Fetches by URL: what a server could use a fetch for, and what it may not."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple

import pytest

from gateway.media.host_names import HostNames
from gateway.media.media_reference import FetchFailed, TooManyBytes
from gateway.media.public_url import Fetcher, IPAddress, Resolver, is_own, is_public
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
LIMIT = 4096
Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Entry(NamedTuple):
    """An address of an interface, as psutil tells it."""

    family: int
    address: str
    netmask: str | None


class Web:
    """A server on the loopback under any name, with what it was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []
        self.resolved: list[str] = []

    def url(self, path: str = "/", host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"

    async def resolve(self, host: str, _: int) -> Iterable[str]:
        self.resolved.append(host)
        return ["127.0.0.1"]

    def fetcher(self) -> Fetcher:
        """As if the loopback were the internet."""
        return Fetcher(self.resolve, lambda _: True)


@asynccontextmanager
async def serving(handle: Handler) -> AsyncGenerator[Web, None]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        web.asked.append(head)
        try:
            await handle(head.split()[1], writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    web = Web(server.sockets[0].getsockname()[1])
    try:
        yield web
    finally:
        server.close()


async def reply(writer: asyncio.StreamWriter, body: bytes = b"", status: str = "200 OK", **headers: str) -> None:
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{''.join(lines)}\r\n".encode() + body)
    await writer.drain()


def guarded() -> Fetcher:
    """As requests have it, of a daemon without keys."""
    return Fetcher(partial(HostNames().resolve, ""))


async def fetch(fetcher: Fetcher, url: str, timeout_s: float = patient(10)) -> bytes:
    return await fetcher.fetch(url, LIMIT, timeout_s, lambda _: None)


async def refused(fetcher: Fetcher, url: str, timeout_s: float = patient(10)) -> str:
    with pytest.raises(FetchFailed) as caught:
        await fetch(fetcher, url, timeout_s)
    return str(caught.value)


async def picture(path: str, writer: asyncio.StreamWriter) -> None:
    await reply(writer, b"picture", set_cookie="a=b")


async def test_the_body_of_a_public_url_is_fetched_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    taken: list[int] = []
    async with serving(picture) as web:
        body = await web.fetcher().fetch(web.url("/cat?size=1"), LIMIT, patient(10), taken.append)

    assert (body, sum(taken)) == (b"picture", 7)
    head = web.asked[0].lower()
    assert head.startswith("get /cat?size=1 http/1.1\r\n")
    assert f"host: pictures.example:{web.port}" in head
    assert "accept-encoding: identity" in head
    assert "cookie" not in head
    assert "authorization" not in head


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "0x7f.1", "127.1", "2130706433", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]",
     "169.254.169.254", "10.0.0.1", "192.168.1.1", "[fe80::1]", "[fd00::1]", "[::]", "100.64.0.1",
     "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)  # fmt: skip
async def test_no_address_of_this_machine_or_network_is_dialled(host: str) -> None:
    async with serving(picture) as web:
        reason = await refused(guarded(), web.url(host=host))

    assert web.asked == []
    assert reason in ("its host is not on the public internet", "its host is not known")
    assert "127" not in reason


def test_public_addresses_are_the_global_ones() -> None:
    assert all(is_public(ip_address(text)) for text in ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"))
    assert not any(is_public(ip_address(text)) for text in ("224.0.0.1", "ff02::1", "192.0.2.1", "2001::1"))
    held = ("fec0::1", "64:ff9b:1::7f00:1", "64:ff9b::1:7f00:1", "::127.0.0.1", "::ffff:0:127.0.0.1", "4000::1")
    assert not any(is_public(ip_address(text)) for text in held)


def test_networks_of_the_machine_itself_are_its_own_though_public() -> None:
    def interfaces() -> dict[str, list[Entry]]:
        return {
            "eth0": [
                Entry(socket.AF_INET, "8.8.8.8", "255.255.255.0"),
                Entry(socket.AF_INET6, "2001:db8::1%eth0", "ffff:ffff:ffff:ffff::"),
                Entry(-1, "00:00:00:00:00:00", None),
            ],
            "tun0": [Entry(socket.AF_INET, "9.9.9.9", None)],
            "all0": [Entry(socket.AF_INET, "7.7.7.7", "0.0.0.0")],
        }

    for text in ("8.8.8.9", "2001:db8::2", "::ffff:8.8.8.9", "9.9.9.9", "7.7.7.7"):
        assert is_own(ip_address(text), interfaces), text
    for text in ("8.8.9.9", "2001:db9::2", "9.9.9.8", "1.1.1.1"):
        assert not is_own(ip_address(text), interfaces), text


async def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    async def both(host: str, port: int) -> Iterable[str]:
        return ["8.8.8.8", "10.0.0.1"]

    assert await refused(Fetcher(both), "http://pictures.example/") == "its host is not on the public internet"


async def test_the_addresses_of_a_name_are_bounded_and_checked_beside_the_loop() -> None:
    checked: list[int] = []

    def check(address: IPAddress) -> bool:
        checked.append(threading.get_ident())
        return False

    def answering(count: int) -> Resolver:
        async def many(host: str, port: int) -> Iterable[str]:
            return [f"8.8.{at >> 8}.{at & 255}" for at in range(count)]

        return many

    assert await refused(Fetcher(answering(4000), check), "http://a.example/") == "its host has more than 32 addresses"
    assert not checked
    assert "public internet" in await refused(Fetcher(answering(32), check), "http://a.example/")
    assert checked
    assert threading.get_ident() not in checked


async def test_the_address_that_was_checked_is_dialled_whatever_dns_says_next() -> None:
    """DNS rebinding: the first answer is fine, later ones point elsewhere; there is only one question."""
    answers: Iterator[str] = iter(["127.0.0.1", "127.0.0.2", "127.0.0.3"])

    async def changing(host: str, port: int) -> Iterable[str]:
        return [next(answers)]

    async with serving(picture) as web:
        fetcher = Fetcher(changing, lambda address: str(address) == "127.0.0.1")
        assert await fetch(fetcher, web.url()) == b"picture"
        assert await refused(fetcher, web.url()) == "its host is not on the public internet"

    assert len(web.asked) == 1


async def test_a_redirect_to_a_private_address_is_refused() -> None:
    async def redirecting(path: str, writer: asyncio.StreamWriter) -> None:
        await reply(writer, status="302 Found", location=f"http://inside.example:{web.port}/secret")

    async with serving(redirecting) as web:

        async def resolve(host: str, port: int) -> Iterable[str]:
            return ["127.0.0.2" if host == "inside.example" else "127.0.0.1"]

        fetcher = Fetcher(resolve, lambda address: str(address) == "127.0.0.1")
        assert await refused(fetcher, web.url()) == "its host is not on the public internet"

    assert len(web.asked) == 1


@pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://x/", "ftp://x/", "http://u:p@x/", "", "http://"])
async def test_a_redirect_elsewhere_than_the_web_is_refused(location: str) -> None:
    async def redirecting(path: str, writer: asyncio.StreamWriter) -> None:
        # An empty Location is the page itself: then it is redirected too often.
        await reply(writer, status="301 Moved", location=location)

    async with serving(redirecting) as web:
        assert await refused(web.fetcher(), web.url())

    assert set(web.resolved) == {"pictures.example"}


async def test_three_redirects_are_followed_and_no_more() -> None:
    async def counting(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path[1:])
        await (reply(writer, b"there") if not left else reply(writer, status="307 T", location=f"/{left - 1}"))

    async with serving(counting) as web:
        assert await fetch(web.fetcher(), web.url("/3")) == b"there"
        assert await refused(web.fetcher(), web.url("/4")) == "it was redirected more than 3 times"


@pytest.mark.parametrize("is_announced", [True, False])
async def test_an_endless_body_ends_at_the_limit(is_announced: bool) -> None:
    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        length = f"content-length: {1 << 40}\r\n" if is_announced else ""
        writer.write(f"HTTP/1.1 200 OK\r\n{length}connection: close\r\n\r\n".encode())
        while True:
            writer.write(bytes(1024))
            await writer.drain()

    async with serving(endless) as web:
        with pytest.raises(TooManyBytes):
            await fetch(web.fetcher(), web.url())


async def test_a_slow_body_ends_with_its_time() -> None:
    async def slow(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with serving(slow) as web:
        limit_s = patient(0.3)
        assert await refused(web.fetcher(), web.url(), limit_s) == f"it took longer than {limit_s:g} seconds"


async def test_what_a_refusal_takes_of_memory_may_be_refused_midway() -> None:
    def full(_: int) -> None:
        raise MemoryError

    async with serving(picture) as web:
        with pytest.raises(MemoryError):
            await web.fetcher().fetch(web.url(), LIMIT, patient(10), full)


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [
        ("404 Not Found", {}, "its server answered with status 404"),
        ("206 Partial", {}, "its server answered with status 206"),
        ("200 OK", {"content_encoding": "gzip"}, "its server compressed the answer, which it was asked not to"),
    ],
)
async def test_other_answers_are_refused_by_what_they_are(status: str, headers: dict[str, str], reason: str) -> None:
    async def other(path: str, writer: asyncio.StreamWriter) -> None:
        await reply(writer, b"x", status, **headers)

    async with serving(other) as web:
        assert await refused(web.fetcher(), web.url()) == reason


@pytest.mark.parametrize(
    "url",
    ["ftp://x/", "http:///x", "http://a b/", "http://u@x/", "http://x:0/", "http://x:99999/", "http://\u00e4.example/"],
)
async def test_a_url_that_is_none_of_the_web_is_refused(url: str) -> None:
    assert await refused(guarded(), url)
