"""Settings of clients for this mlxd, shown on the web page as `mlxctl connect` prints them. No file is written."""

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.caller import OWNER
from gateway.config.address import is_daemon_url
from gateway.errors import BadRequest
from gateway.failed import CommandFailed
from gateway.http.exchange import json_response
from gateway.services import Services
from gateway.web.schemas import ClientSetup

# Shown in place of a key, because mlxd does not know the secrets of keys.
YOUR_KEY: Final = "YOUR-KEY"


async def client_setup(services: Services, request: Request) -> Response:
    """Answer `GET /ui/api/connect?client=NAME&model=NAME&url=URL`."""
    query = request.query_params
    url = query.get("url", "").rstrip("/")
    if not is_daemon_url(url):
        raise BadRequest("'url' is mlxd's address, such as http://localhost:8484.", "url", "invalid_value")
    model = services.router.resolve(query.get("model", ""), OWNER)
    ready = services.view(model).ready
    context = ready.max_context if ready is not None else model.context
    services.keyring.refresh()
    key = "" if services.keyring.is_open else YOUR_KEY
    try:
        return json_response(await asyncio.to_thread(_setup, query.get("client", ""), url, model.name, context, key))
    except CommandFailed as error:
        raise BadRequest(str(error), "client", "invalid_value") from None


def _setup(client: str, url: str, model: str, context: int, key: str) -> ClientSetup:
    # This import is slow, because it loads the libraries that preserve comments of TOML and YAML.
    from gateway.client_setup.client_setups import CLIENTS, DEFAULT_CONTEXT, Endpoint, as_data, setup

    data = as_data(setup(client or next(iter(CLIENTS)), Endpoint(url, model, context or DEFAULT_CONTEXT, key)))
    return msgspec.convert(data | {"clients": list(CLIENTS)}, ClientSetup)
