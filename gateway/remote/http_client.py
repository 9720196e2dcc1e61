"""HTTP clients to upstreams: no proxy, no redirects, no cookies, and no compression."""

import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx

KEPT_CONNECTIONS: Final = 32


def make_client(
    ca: str,
    silence_s: float,
    connect_s: float,
    base_url: str = "",
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """Make an HTTP client, which the requests of all API keys share. `ca` is a PEM file, or empty for the system's.
    `transport` replaces the connections of this machine.

    Cookies are disabled, because with them the server could link the requests of different keys.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        transport=transport,
        verify=ssl.create_default_context(cafile=ca or None) if transport is None else False,
        trust_env=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        # Responses are read as raw bytes and are never decompressed.
        headers={"accept-encoding": "identity"},
        timeout=httpx.Timeout(silence_s, connect=connect_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
    )
