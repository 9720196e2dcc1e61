"""Visitors of the page: what a browser sends for it, and how one logs in."""

from typing import Any

import httpx2

from gateway.web.session import TOKEN_START
from tests.gateway.harness import Gateway


def own(gateway: Gateway, **more: str) -> dict[str, str]:
    """Headers of a fetch by the page itself."""
    return {"origin": gateway.url, "sec-fetch-site": "same-origin"} | more


def code_of(gateway: Gateway) -> str:
    return gateway.app.backend.gate.sessions.make_code()


async def log_in(gateway: Gateway) -> dict[str, str]:
    """Headers of a visitor with a session."""
    answer = await gateway.client.post("/ui/api/session", json={"code": code_of(gateway)}, headers=own(gateway))
    assert answer.status_code == 200, answer.text
    token = answer.json()["token"]
    assert token.startswith(TOKEN_START)
    return own(gateway, authorization=f"Bearer {token}")


def api_routes(gateway: Gateway) -> list[tuple[str, str]]:
    """Every method and path of `/ui/api`, with something in place of parameters."""
    routes = [
        (method, route.path.replace("{id}", "x"))
        for route in gateway.app.backend.routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    assert len(routes) > 5
    return routes


async def ask(gateway: Gateway, method: str, path: str, headers: dict[str, str], **more: Any) -> httpx2.Response:
    """A request whose body, where there may be one, is JSON."""
    body = {"json": {}} if method == "POST" and not more else more
    return await gateway.client.request(method, path, headers=headers, **body)
