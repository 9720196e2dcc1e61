"""Who sees what of an explanation, and what is left of it without the worker."""

from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile
from tests.gateway.harness import Gateway, chat, running
from tests.gateway.request.test_in_flight import admin_of

pytestmark = pytest.mark.anyio


async def asked(gateway: Gateway, name: str, secret: str = "") -> str:
    """Serve a request with this id, and return the id of its answer."""
    headers = {"x-request-id": name} | ({"authorization": f"Bearer {secret}"} if secret else {})
    answer = await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def why(gateway: Gateway, name: str) -> dict[str, Any]:
    async with admin_of(gateway) as admin:
        answer = await admin.get(f"/v1/requests/{name}/why")
        assert answer.status_code == 200, answer.text
        return answer.json()


def changed(found: dict[str, Any]) -> str:
    (text,) = [cause["text"] for cause in found["causes"] if cause["code"] == "message_changed"]
    return text


async def test_excerpts_are_of_requests_without_a_key_alone(tmp_path: Path) -> None:
    secret = KeyFile(tmp_path / "keys" / "keys.json").create(Key(name="alice", prefix="", salt="", hash=""))[1]
    async with running(tmp_path) as gateway:
        await asked(gateway, "hers", secret)
        hers = await why(gateway, "hers")
    assert hers["key"] == "alice"
    assert "“#0f” became" in changed(hers)


async def test_a_request_without_a_key_is_explained_in_full_by_either_id(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        answer_id = await asked(gateway, "mine")
        mine = await why(gateway, "mine")
        assert (await why(gateway, answer_id)) == mine
        assert (await gateway.client.get("/v1/requests/mine/why")).status_code == 404
    assert "“an excerpt” became" in changed(mine)
    assert mine["answer_id"] == answer_id
    assert mine["outcome"] == "length"
    assert mine["timing"]["prompt_tokens"] == 3


async def test_times_are_left_when_the_worker_has_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        await asked(gateway, "mine")
        await gateway.pool.unload("m")
        mine = await why(gateway, "mine")
        await asked(gateway, "again")
        again = await why(gateway, "again")
    assert mine["causes"][-1]["code"] == "unknown"
    assert [cause["code"] for cause in again["causes"] if cause["code"] == "load"] == ["load"]


async def test_a_request_that_runs_or_never_was_is_a_404(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway, admin_of(gateway) as admin:
        assert (await admin.get("/v1/requests/nobody/why")).status_code == 404
        body = chat(max_tokens=100_000, stream=True)
        headers = {"x-request-id": "endless"}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            await anext(answer.aiter_lines())
            running_one = await admin.get("/v1/requests/endless/why")
    assert running_one.status_code == 404
    assert "still runs" in running_one.json()["error"]["message"]
