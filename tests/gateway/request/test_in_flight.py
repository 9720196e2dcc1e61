import asyncio
import json
import stat
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.config.settings import ServerConfig
from gateway.disk_and_clock import JUMP_S, TRUST_S, WallClock
from gateway.http.capture import Captures
from tests.gateway.harness import Gateway, chat, events, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PREFILLING = json.dumps([["progress"]])


@asynccontextmanager
async def admin_of(gateway: Gateway) -> AsyncGenerator[httpx2.AsyncClient, None]:
    transport = httpx2.ASGITransport(app=gateway.admin)  # pyright: ignore[reportArgumentType]
    async with httpx2.AsyncClient(transport=transport, base_url="http://mlxd") as client:
        yield client


async def listed(admin: httpx2.AsyncClient) -> list[dict[str, Any]]:
    return (await admin.get("/v1/requests")).json()["requests"]


async def one_in_state(admin: httpx2.AsyncClient, state: str) -> dict[str, Any]:
    """The only request there is, once it is in this state."""
    async with asyncio.timeout(patient(15)):
        while not (found := [one for one in await listed(admin) if one["state"] == state]):  # noqa: ASYNC110 - what is polled for happens in other processes too
            await asyncio.sleep(0.005)
    [one] = found
    return one


async def cancel(admin: httpx2.AsyncClient, name: str) -> int:
    return (await admin.post("/v1/requests/cancel", json={"id": name})).status_code


async def test_a_request_is_listed_while_it_is_served_and_no_longer(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"]) as gateway, admin_of(gateway) as admin:
        body = {"model": "m", "prompt": "hi", "max_tokens": 100_000, "stream": True}
        headers = {"x-request-id": "mine"}
        async with gateway.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            one = await one_in_state(admin, "decode")

            assert (one["id"], one["model"], one["path"]) == ("mine", "m", "/v1/completions")
            assert (one["stream"], one["sequences"], one["prompt_tokens"]) == (True, 1, 3)
            assert one["generated_tokens"] > 0
            assert one["age_s"] >= one["ttft_s"] > 0
            shown = (await admin.get("/v1/requests/mine")).json()
            assert shown["live"]["id"] == "mine"
            assert shown["captured"] is None
        await until(lambda: not gateway.app.services.requests.views())
        assert (await admin.get("/v1/requests/mine")).status_code == 404


async def test_the_rest_of_a_prefill_is_estimated_at_its_own_speed_without_cached_tokens(tmp_path: Path) -> None:
    # 20 tokens in half a second, beside 10 that were cached: 70 are left.
    said = json.dumps([["progress", 30, 100, 10, 500]])
    async with running(tmp_path, worker="talkative") as gateway, admin_of(gateway) as admin:
        asking = asyncio.create_task(
            gateway.client.post("/v1/completions", json={"model": "m", "prompt": said, "max_tokens": 5})
        )
        one = await one_in_state(admin, "prefill")
        assert (one["prefilled_tokens"], one["prefill_left_s"]) == (30, 1.8)
        assert await cancel(admin, one["id"]) == 200
        assert (await asking).status_code == 499


async def test_states_before_the_first_token_are_told_apart(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway, admin_of(gateway) as admin:
        for prompt, state in ((PREFILLING, "prefill"), ("ignored", "queued")):
            asking = asyncio.create_task(
                gateway.client.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 5})
            )
            one = await one_in_state(admin, state)
            assert await cancel(admin, one["id"]) == 200
            assert (await asking).status_code == 499
    async with running(tmp_path, ["--load-s", "60"]) as gateway, admin_of(gateway) as admin:
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat()))
        one = await one_in_state(admin, "loading")
        assert await cancel(admin, one["id"]) == 200
        assert (await asking).json()["error"]["code"] == "cancelled"


def chat_error(text: str) -> tuple[str, str]:
    return events(text)[-1]["error"]["code"], events(text)[-1]["error"]["message"]


def anthropic_error(text: str) -> tuple[str, str]:
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    return last["type"], last["error"]["message"]


def responses_error(text: str) -> tuple[str, str]:
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    return last["type"], last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "read", "kind"),
    [
        ("/v1/chat/completions", chat(max_tokens=100_000), chat_error, "cancelled"),
        ("/v1/messages", chat(max_tokens=100_000), anthropic_error, "error"),
        ("/v1/responses", {"model": "m", "input": "hi"}, responses_error, "response.failed"),
    ],
)
async def test_a_cancelled_stream_ends_with_an_error_of_its_dialect(
    tmp_path: Path, path: str, body: dict[str, Any], read: Callable[[str], tuple[str, str]], kind: str
) -> None:
    async with running(tmp_path, ["--step-ms", "5"]) as gateway, admin_of(gateway) as admin:
        async with gateway.client.stream("POST", path, json=body | {"stream": True}) as answer:
            one = await one_in_state(admin, "decode")
            assert await cancel(admin, one["id"]) == 200
            text = "".join([piece async for piece in answer.aiter_text()])

        assert read(text) == (kind, "The operator cancelled this request.")
        assert "[DONE]" not in text
        assert gateway.link.in_flight == 0
        assert gateway.app.services.admission.inside("m") == 0


async def test_a_stream_that_is_cancelled_while_its_model_loads_ends_with_an_error_event(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "60"]) as gateway, admin_of(gateway) as admin:
        async with gateway.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            # The status has come, with nothing but a sign of life.
            one = await one_in_state(admin, "loading")
            assert await cancel(admin, one["id"]) == 200
            text = "".join([piece async for piece in answer.aiter_text()])

        assert answer.status_code == 200
        assert chat_error(text)[0] == "cancelled"


async def test_a_cancelled_whole_answer_is_a_status_that_no_client_tries_again(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"]) as gateway, admin_of(gateway) as admin:
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat(max_tokens=100_000)))
        one = await one_in_state(admin, "decode")
        assert await cancel(admin, one["id"]) == 200
        answer = await asking

        assert (answer.status_code, answer.json()["error"]["type"]) == (499, "request_cancelled")
        assert "retry-after" not in answer.headers
        assert gateway.metrics.model("m").finished["abort"] == 1


async def test_requests_of_one_id_are_told_apart_and_cancelled_one_by_one(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"]) as gateway, admin_of(gateway) as admin:

        async def ask() -> httpx2.Response:
            body = chat(max_tokens=100_000)
            return await gateway.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"})

        asking = [asyncio.create_task(ask()) for _ in range(2)]
        await until(lambda: len(gateway.app.services.requests.views()) == 2)
        assert {one["id"] for one in await listed(admin)} == {"same", "same~2"}
        assert await cancel(admin, "same~2") == 200
        await until(lambda: any(task.done() for task in asking))
        assert [one["id"] for one in await listed(admin)] == ["same"]
        assert await cancel(admin, "same") == 200
        assert [(await task).headers["x-request-id"] for task in asking] == ["same", "same"]


async def test_an_unknown_id_and_a_bad_body_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway, admin_of(gateway) as admin:
        assert await cancel(admin, "nobody") == 404
        assert (await admin.post("/v1/requests/cancel", json={"request": "x"})).status_code == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/requests"),
        ("GET", "/v1/requests/x"),
        ("POST", "/v1/requests/cancel"),
        ("POST", "/v1/requests/clear"),
    ],
)
async def test_the_public_address_shows_and_cancels_nobodys_requests(tmp_path: Path, method: str, path: str) -> None:
    async with running(tmp_path) as gateway:
        answer = await gateway.client.request(method, path, json={"id": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


# -- captures ----------------------------------------------------------------------------------------------------------


def files(home: Path) -> list[Path]:
    return sorted((home / "captures").glob("*"))


async def kept(gateway: Gateway, count: int) -> None:
    """Until so many requests are kept."""
    async with asyncio.timeout(patient(15)):
        while len(await gateway.app.services.captures.lines()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Ask = Callable[[str], Awaitable[httpx2.Response]]


def asker(gateway: Gateway, **fields: Any) -> Ask:
    async def ask(name: str) -> httpx2.Response:
        headers = {"x-request-id": name, "authorization": "Bearer sk-secret", "x-api-key": "sk-secret"}
        return await gateway.client.post("/v1/chat/completions", json=chat(f"prompt {name}", **fields), headers=headers)

    return ask


async def test_nothing_is_captured_unless_it_is_configured(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway, admin_of(gateway) as admin:
        await asker(gateway)("one")
        answer = await admin.get("/v1/requests/one")

        assert answer.status_code == 404
        assert "set [server] capture" in answer.json()["error"]["message"]
    assert not (tmp_path / "captures").exists()


async def test_a_captured_request_shows_what_was_asked_and_answered_and_no_secret(tmp_path: Path) -> None:
    server = ServerConfig(capture=5)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway, admin_of(gateway) as admin:
        streamed = await asker(gateway, stream=True)("one")
        refused = await gateway.client.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "two"})
        await kept(gateway, 2)
        one = (await admin.get("/v1/requests/one")).json()["captured"]
        two = (await admin.get("/v1/requests/two")).json()["captured"]
        lines = (await admin.get("/v1/requests?captured=1")).json()["captured"]

    assert json.loads(one["request_body"])["messages"][0]["content"] == "prompt one"
    assert one["response_body"] == streamed.text
    assert (one["status"], one["model"], one["outcome"]) == (200, "m", "ok")
    headers = dict(one["request_headers"])
    assert headers["authorization"] == headers["x-api-key"] == "[redacted]"
    assert (two["status"], two["response_body"]) == (400, refused.text)
    assert [line["id"] for line in lines] == ["one", "two"]
    assert stat.S_IMODE((tmp_path / "captures").stat().st_mode) == 0o700
    for file in files(tmp_path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert b"sk-secret" not in file.read_bytes()


async def test_only_the_newest_captures_stay_also_over_a_restart_and_clear_deletes_them(tmp_path: Path) -> None:
    server = ServerConfig(capture=2)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway, admin_of(gateway) as admin:
        for name in ("one", "two", "three"):
            await asker(gateway)(name)
        await kept(gateway, 2)
        assert len(files(tmp_path)) == 2
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway, admin_of(gateway) as admin:
        assert (await admin.get("/v1/requests/one")).status_code == 404
        assert (await admin.get("/v1/requests/three")).json()["captured"]["id"] == "three"
        assert (await admin.post("/v1/requests/clear")).json() == {"captured": 2}
        assert (await admin.get("/v1/requests/three")).status_code == 404
    assert files(tmp_path) == []


async def test_captures_are_deleted_when_they_are_too_much_too_old_or_no_longer_wanted(tmp_path: Path) -> None:
    server = ServerConfig(capture=100)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway:
        gateway.app.services.captures.bytes_max = 64 * 1024
        for number in range(4):
            await asker(gateway, user="x " * 12_500)(str(number))
        await kept(gateway, 2)
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 64 * 1024
    async with running(tmp_path, server=server) as gateway:
        gateway.app.services.captures.age_s = 0.0
        await gateway.app.services.captures.sweep()
        assert files(tmp_path) == []
    async with running(tmp_path, ["--step-ms", "1"], server=ServerConfig(capture=5)) as gateway:
        await asker(gateway)("one")
        await kept(gateway, 1)
    async with running(tmp_path) as gateway:
        await gateway.app.services.captures.sweep()
    assert files(tmp_path) == []


async def test_a_clock_that_jumps_forward_deletes_no_capture_until_it_has_stayed_there(tmp_path: Path) -> None:
    server = ServerConfig(capture=5)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway:
        await asker(gateway)("one")
        await kept(gateway, 1)
    elapsed_s = 0.0
    clock = WallClock(lambda: time.time() + 1e9, lambda: elapsed_s)
    captures = Captures(tmp_path / "captures", lambda: server, clock, age_s=10 * JUMP_S)
    assert [line.id for line in await captures.lines()] == ["one"]
    elapsed_s += TRUST_S + 1
    assert await captures.lines() == []
    captures.close()


async def test_a_body_beyond_the_limit_is_cut_and_says_so(tmp_path: Path) -> None:
    server = ServerConfig(capture=5)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway, admin_of(gateway) as admin:
        await asker(gateway, user="x " * (5 * 512 * 1024))("big")
        await kept(gateway, 1)
        captured = (await admin.get("/v1/requests/big")).json()["captured"]

    assert captured["is_request_cut"]
    assert not captured["is_response_cut"]
    assert len(captured["request_body"]) == 4 * 1024 * 1024


async def test_whoever_may_not_come_in_is_not_captured(tmp_path: Path) -> None:
    async with running(tmp_path, server=ServerConfig(capture=5)) as gateway:
        answer = await gateway.client.post(
            "/v1/chat/completions", json=chat(), headers={"origin": "https://evil.example"}
        )
        assert answer.status_code == 403
        assert await gateway.app.services.captures.lines() == []


async def test_a_folder_that_cannot_be_written_costs_the_capture_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "captures").write_text("not a folder")
    async with running(tmp_path, ["--step-ms", "1"], server=ServerConfig(capture=5)) as gateway:
        assert (await asker(gateway)("one")).status_code == 200
        assert await gateway.app.services.captures.lines() == []
