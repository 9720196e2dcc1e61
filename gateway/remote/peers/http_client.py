"""HTTP clients to peers and upstreams: no proxy, no redirects, no cookies, and answers that are not compressed."""

import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx

KEPT_CONNECTIONS: Final = 32


def make_client(ca: str, silence_s: float, connect_s: float, base_url: str = "") -> httpx.AsyncClient:
    """A client for the requests of all keys. `ca` is a PEM file; empty: the authorities of the system.

    A cookie would be sent with other keys' requests, and tell the server that they come from one daemon.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        verify=ssl.create_default_context(cafile=ca or None),
        trust_env=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        # An answer is read as it comes: nothing that was compressed is ever unpacked.
        headers={"accept-encoding": "identity"},
        timeout=httpx.Timeout(silence_s, connect=connect_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
    )
