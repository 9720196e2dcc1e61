"""Commands to models: the unix socket waits for them and the page does not; both have the same verbs and errors."""

from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest

from gateway.control_types import ModelVerb
from tests.gateway.harness import Gateway, running, until
from tests.gateway.web.visitors import log_in

pytestmark = pytest.mark.anyio


async def command(gateway: Gateway, prefix: str, verb: str, body: dict[str, Any]) -> httpx2.Response:
    """Send a command over the unix socket's app, whose prefix is `/v1`, or from a session of the page."""
    path = f"{prefix}/models/{verb}"
    if prefix != "/v1":
        return await gateway.client.post(path, json=body, headers=await log_in(gateway))
    transport = httpx2.ASGITransport(gateway.admin)  # pyright: ignore[reportArgumentType]
    async with httpx2.AsyncClient(transport=transport, base_url="http://mlxd") as owner:
        return await owner.post(path, json=body)


@pytest.mark.parametrize("body", [{"model": "nope"}, {"name": "m"}, {"model": ""}, {"model": "m", "wait": True}])
@pytest.mark.parametrize("verb", get_args(ModelVerb))
async def test_the_socket_and_the_page_refuse_a_command_in_the_same_words(
    tmp_path: Path, verb: str, body: dict[str, Any]
) -> None:
    async with running(tmp_path) as gateway:
        socket, page = [await command(gateway, prefix, verb, body) for prefix in ("/v1", "/ui/api")]

    assert socket.status_code == (404 if body == {"model": "nope"} else 400)
    assert (page.status_code, page.json()) == (socket.status_code, socket.json())


async def test_the_socket_reports_the_result_and_the_page_that_the_command_has_begun(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "0.3"]) as gateway:
        begun = await command(gateway, "/ui/api", "load", {"model": "m"})
        assert (begun.status_code, begun.json()) == (202, {"model": "m", "order": "load"})

        done = await command(gateway, "/v1", "load", {"model": "m"})
        assert (done.status_code, done.json()) == (200, {"model": "m", "state": "ready"})


async def test_a_load_that_fails_is_an_error_on_the_socket_and_a_last_failure_on_the_page(tmp_path: Path) -> None:
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "20"]) as gateway:
        failed = await command(gateway, "/v1", "load", {"model": "m"})
        assert failed.status_code >= 500
        message = failed.json()["error"]["message"]

        begun = await command(gateway, "/ui/api", "load", {"model": "m"})
        assert begun.status_code == 202
        await until(lambda: not gateway.app.services.tasks)
        failure = gateway.pool.worker("m").view().last_failure
        assert failure is not None
        assert failure.message in message
        assert gateway.metrics.unhandled_errors == 0


async def test_a_repeated_command_of_the_page_joins_the_running_one(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "600"]) as gateway:
        for _ in range(3):
            assert (await command(gateway, "/ui/api", "load", {"model": "m"})).status_code == 202
        assert len(gateway.app.services.tasks) == 1
