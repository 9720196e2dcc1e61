"""Guarded fetches of media by URL: only from public addresses, with each redirect checked and bytes and time limited.

A name is resolved once, and the connection uses one of the checked addresses, so a later DNS answer cannot change the
target. Proxies from the environment, cookies and credentials are not used. Error messages contain no address.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_interface
from typing import Any, Final, cast
from urllib.parse import urljoin, urlsplit

import certifi
import httpcore2
import psutil

from gateway.media.media_reference import FetchFailed, TooManyBytes

REDIRECTS_MAX: Final = 3
URL_CHARS_MAX: Final = 8192
# Maximum number of addresses of a host: each of them is checked.
ADDRESSES_MAX: Final = 32
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = [
    ("accept", "image/*, video/*, audio/*, */*;q=0.5"),
    # A compressed answer could grow beyond every limit.
    ("accept-encoding", "identity"),
    ("user-agent", "mlxd"),
]
_NAT64: Final = IPv6Network("64:ff9b::/96")
# All global unicast addresses are in this range. Other ranges embed IPv4 addresses in various ways.
_GLOBAL: Final = IPv6Network("2000::/3")

IPAddress = IPv4Address | IPv6Address
Interfaces = Callable[[], Mapping[str, Sequence[Any]]]
Resolver = Callable[[str, int], Awaitable[Iterable[str]]]


def is_public(address: IPAddress) -> bool:
    """Whether an address is public. An embedded IPv4 address must be public too."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _GLOBAL:
            return False
    return address.is_global and not address.is_multicast


def is_own(address: IPAddress, interfaces: Interfaces = psutil.net_if_addrs) -> bool:
    """Whether an address is on one of this machine's own networks, which may have public addresses."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    for entries in interfaces().values():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            host = ip_interface(f"{entry.address.partition('%')[0]}{_prefix(entry.netmask)}")
            # An empty mask would make the whole internet count as this machine's network.
            if address == host.ip or (host.network.prefixlen and address in host.network):
                return True
    return False


def _prefix(netmask: str | None) -> str:
    """Convert a netmask to a prefix length. An address without a mask, as that of a tunnel, is a network of its own."""
    if not netmask:
        return ""
    return f"/{int(ip_address(netmask)).bit_count()}"


def may_dial(address: IPAddress) -> bool:
    """Whether mlxd may connect to an address on behalf of a client."""
    return is_public(address) and not is_own(address)


class Fetcher:
    """Fetches media over its own connections. Tests replace `resolve` and `may_dial`."""

    def __init__(self, resolve: Resolver, may_dial: Callable[[IPAddress], bool] = may_dial) -> None:
        self._backend = _GuardedBackend(resolve, may_dial)

    async def fetch(self, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        """Fetch the body of a URL. `take` is called with the size of each piece before the piece is kept, and may
        raise.

        Raises `FetchFailed` or its subclass `TooManyBytes`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                # The first call of `_tls` reads the certificate authorities from the disk.
                tls = await asyncio.to_thread(_tls)
                async with httpcore2.AsyncConnectionPool(ssl_context=tls, network_backend=self._backend) as pool:
                    return await self._follow(pool, url, limit_bytes, take)
        except TimeoutError:
            raise FetchFailed(f"it took longer than {timeout_s:g} seconds") from None
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
            raise FetchFailed("its server cannot be reached") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException):
            raise FetchFailed("its server broke off, or does not speak HTTP") from None

    async def _follow(
        self, pool: httpcore2.AsyncConnectionPool, url: str, limit_bytes: int, take: Callable[[int], None]
    ) -> bytes:
        for _ in range(REDIRECTS_MAX + 1):
            check_url(url)
            async with _opened(pool, url) as answer:
                if answer.status in _REDIRECTS:
                    url = urljoin(url, _header(answer, b"location"))
                    continue
                if answer.status != 200:
                    raise FetchFailed(f"its server answered with status {answer.status}")
                return await _body(answer, limit_bytes, take)
        raise FetchFailed(f"it was redirected more than {REDIRECTS_MAX} times")


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that all fetches share. Making one takes 50 ms."""
    return ssl.create_default_context(cafile=certifi.where())


def check_url(url: str) -> None:
    """Raises `FetchFailed` unless the URL is a plain web URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise FetchFailed("it is not a valid URL") from None
    if parts.scheme not in ("http", "https"):
        raise FetchFailed("only http and https URLs are fetched")
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise FetchFailed("it is not a valid URL")
    if not parts.hostname or port == 0 or "@" in parts.netloc:
        raise FetchFailed("it names no host, or a user")


@asynccontextmanager
async def _opened(pool: httpcore2.AsyncConnectionPool, url: str) -> AsyncGenerator[httpcore2.Response]:
    try:
        async with pool.stream("GET", url, headers=_HEADERS) as answer:
            yield answer
    except (httpcore2.UnsupportedProtocol, ValueError, UnicodeError):
        raise FetchFailed("it is not a valid URL") from None


async def _body(answer: httpcore2.Response, limit_bytes: int, take: Callable[[int], None]) -> bytes:
    length = _header(answer, b"content-length")
    if length.isdigit() and (len(length) > 18 or int(length) > limit_bytes):
        raise TooManyBytes("it is too large")
    if _header(answer, b"content-encoding") not in ("", "identity"):
        raise FetchFailed("its server compressed the answer, which it was asked not to")
    chunks: list[bytes] = []
    size = 0
    async for chunk in answer.aiter_stream():
        size += len(chunk)
        if size > limit_bytes:
            raise TooManyBytes("it is too large")
        take(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def _header(answer: httpcore2.Response, name: bytes) -> str:
    values = [value for key, value in answer.headers if key.lower() == name]
    return values[0].decode("latin-1").strip() if values else ""


class _GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Network backend that connects only to permitted addresses of the host name that was checked."""

    def __init__(self, resolve: Resolver, may_dial: Callable[[IPAddress], bool]) -> None:
        self._resolve = resolve
        self._may_dial = may_dial
        self._inner = cast(httpcore2.AsyncNetworkBackend, httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = list(await self._resolve(host, port))
        except (OSError, UnicodeError):
            raise FetchFailed("its host is not known") from None
        if len(addresses) > ADDRESSES_MAX:
            raise FetchFailed(f"its host has more than {ADDRESSES_MAX} addresses")
        # The check reads this machine's interfaces, which takes a while.
        if not addresses or not await asyncio.to_thread(self._may_dial_all, addresses):
            raise FetchFailed("its host is not on the public internet")
        return await self._inner.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    def _may_dial_all(self, addresses: Sequence[str]) -> bool:
        return all(self._may_dial(ip_address(address)) for address in addresses)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
