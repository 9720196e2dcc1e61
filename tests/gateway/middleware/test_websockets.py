"""WebSocket handshakes on paths without WebSockets, by a real WebSocket client over a real socket."""

import json
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.gateway.harness import running

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_a_handshake_on_another_path_is_a_426_and_the_connection_takes_the_next_request(tmp_path: Path) -> None:
    offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    async with running(tmp_path) as gateway:
        for path in ("/v1/responses/x", "/v1/chat/completions", "/v1/messages", "/", "/api/chat", "/nope"):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://127.0.0.1:{gateway.port}{path}"):
                    pass

            answer = refused.value.response
            assert answer.status_code == 426, path
            assert answer.headers["upgrade"] == "HTTP/1.1"
            assert answer.headers["connection"] == "upgrade"
            assert "HTTP/1.1" in json.dumps(json.loads(answer.body or b""))

        by_http = await gateway.client.get("/v1/responses", headers=offer)
        assert by_http.status_code == 426
        assert by_http.json()["error"]["code"] == "upgrade_required"
        assert (await gateway.client.get("/livez")).status_code == 200
        assert gateway.metrics.unhandled_errors == 0
