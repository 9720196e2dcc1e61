"""Batches over HTTP: whose they are, what they cost, their bounds, and when their requests run."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import Key, KeyFile
from gateway.config.settings import BatchesConfig, MemoryConfig, ModelConfig
from gateway.request.admission import BatchGate
from gateway.workers.supervisor.state import State, WorkerLimits
from tests.gateway.harness import DEADLINE_S, Gateway, chat, running, until
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def home() -> AsyncGenerator[Path, None]:
    with short_home() as path:
        yield path


def lines(count: int, **fields: Any) -> bytes:
    made = [{"custom_id": f"r{at}", "method": "POST", "url": CHAT, "body": chat(**fields)} for at in range(count)]
    return b"\n".join(json.dumps(each).encode() for each in made)


async def uploaded(client: httpx2.AsyncClient, content: bytes) -> httpx2.Response:
    return await client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})


async def begun(client: httpx2.AsyncClient, content: bytes) -> str:
    file = (await uploaded(client, content)).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return (await client.post("/v1/batches", json=body)).json()["id"]


async def batch(client: httpx2.AsyncClient, batch_id: str) -> dict[str, Any]:
    return (await client.get(f"/v1/batches/{batch_id}")).json()


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(patient(DEADLINE_S)):
        while not await condition():  # noqa: ASYNC110 - it happens in tasks of the gateway
            await asyncio.sleep(0.01)


async def ended(client: httpx2.AsyncClient, batch_id: str) -> dict[str, Any]:
    async def is_over() -> bool:
        return (await batch(client, batch_id))["status"] in ("completed", "failed", "expired", "cancelled")

    await poll(is_over)
    return await batch(client, batch_id)


def key(home: Path, name: str, **fields: Any) -> dict[str, str]:
    """Headers with a new key."""
    made = Key(name=name, prefix="", salt="", hash="", **fields)
    return {"authorization": f"Bearer {KeyFile(home / 'keys' / 'keys.json').create(made)[1]}"}


# -- keys ------------------------------------------------------------------------------------------------------------


async def test_other_keys_find_neither_files_nor_batches(home: Path) -> None:
    async with running(home) as gateway:
        client = gateway.client
        mine, other = key(home, "mine"), key(home, "other")
        client.headers.update(mine)
        batch_id = await begun(client, lines(1))
        done = await ended(client, batch_id)
        assert done["status"] == "completed"
        files = [done["input_file_id"], done["output_file_id"]]
        client.headers.update(other)

        for path in (
            f"/v1/batches/{batch_id}",
            *(f"/v1/files/{file}{part}" for file in files for part in ("", "/content")),
        ):
            assert (await client.get(path)).status_code == 404
        assert (await client.post(f"/v1/batches/{batch_id}/cancel")).status_code == 404
        assert (await client.delete(f"/v1/files/{files[0]}")).status_code == 404
        body = {"input_file_id": files[0], "endpoint": CHAT, "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=body)).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.get(path)).json()["data"] == []


async def test_a_batch_is_charged_to_its_key_but_not_to_its_rates(home: Path) -> None:
    async with running(home) as gateway:
        client = gateway.client
        client.headers.update(key(home, "k", rpm=2, concurrency=1))
        done = await ended(client, await begun(client, lines(5)))

        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 5)
        used = gateway.app.services.ledger.day("k")
        assert (used.requests, used.tokens) == (5, done["usage"]["total_tokens"])
        assert gateway.metrics.key("k").generation_tokens == done["usage"]["output_tokens"]
        assert gateway.metrics.batch_requests["succeeded"] == 5


async def test_a_batch_reaches_only_models_that_its_key_may_use(home: Path) -> None:
    models = [ModelConfig(name=name, path=name) for name in ("m", "secret")]
    async with running(home, models=models) as gateway:
        client = gateway.client
        client.headers.update(key(home, "k", models=("m",)))
        done = await ended(client, await begun(client, lines(1, model="secret")))
        (result,) = (await client.get(f"/v1/files/{done['error_file_id']}/content")).text.splitlines()
        answer = json.loads(result)["response"]

    assert (answer["status_code"], answer["body"]["error"]["code"]) == (404, "model_not_found")
    assert "secret" not in answer["body"]["error"]["message"].partition("Models here")[2]


async def test_a_budget_holds_a_batch_back_and_ends_none_of_its_requests(home: Path) -> None:
    async with running(home) as gateway:
        client = gateway.client
        client.headers.update(key(home, "k", requests_per_day=2))
        batch_id = await begun(client, lines(4))

        async def is_spent() -> bool:
            return gateway.metrics.key("k").rejections["budget"] > 0

        await poll(is_spent)
        counts = (await batch(client, batch_id))["request_counts"]
        assert counts["failed"] == 0
        assert counts["completed"] <= 2


async def test_a_key_that_is_revoked_ends_its_batch_with_errors(home: Path) -> None:
    async with running(home, ["--step-ms", "20"]) as gateway:
        client = gateway.client
        admin = key(home, "admin", is_admin=True)
        batch_id = await begun(httpx_with(gateway, key(home, "k")), lines(40, max_tokens=20))
        KeyFile(home / "keys" / "keys.json").revoke("k")
        client.headers.update(admin)
        runner = gateway.app.batches

        async def is_over() -> bool:
            await client.get("/v1/models")
            return all(each.state == "completed" for each in runner.views())

        await poll(is_over)
        (view,) = runner.views()
        assert (view.id, view.succeeded + view.failed) == (batch_id, 40)
        assert view.failed > 0


def httpx_with(gateway: Gateway, headers: dict[str, str]) -> httpx2.AsyncClient:
    gateway.client.headers.update(headers)
    return gateway.client


# -- bounds ----------------------------------------------------------------------------------------------------------


async def test_what_finds_no_room_on_the_disk_is_refused_and_leaves_nothing(home: Path) -> None:
    async with running(home, batches=BatchesConfig(disk_bytes=4 << 20)) as gateway:
        client = gateway.client
        first = await uploaded(client, b"x" * (3 << 20))
        second = await uploaded(client, b"x" * (3 << 20))
        messages = [{"custom_id": "a", "params": {"messages": [{"role": "user", "content": "x" * (2 << 20)}]}}]
        third = await client.post("/v1/messages/batches", json={"requests": messages})

        assert [each.status_code for each in (first, second, third)] == [200, 413, 413]
        assert second.json()["error"]["code"] == "storage_full"
        assert third.json()["type"] == "error"
        assert (await client.delete(f"/v1/files/{first.json()['id']}")).status_code == 200
        assert (await uploaded(client, b"x" * (3 << 20))).status_code == 200
        await until(lambda: len(list((home / "state" / "batches").iterdir())) == 2)


async def test_a_file_that_is_too_large_is_refused_before_it_is_read(home: Path) -> None:
    async with running(home) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        writer.write(f"{head}content-length: {1 << 30}\r\n\r\n".encode())
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_an_upload_whose_client_leaves_is_deleted(home: Path) -> None:
    async with running(home) as gateway:
        head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'

        async def part() -> AsyncGenerator[bytes, None]:
            yield head + b"x" * (1 << 20)
            await asyncio.get_running_loop().create_future()

        kind = {"content-type": "multipart/form-data; boundary=b"}
        sending = asyncio.create_task(gateway.client.post("/v1/files", headers=kind, content=part()))
        folder = home / "state" / "batches"
        await until(lambda: folder.exists() and any(path.stat().st_size for path in folder.iterdir()))
        sending.cancel()
        await until(lambda: not list(folder.iterdir()))


async def test_batches_can_be_off(home: Path) -> None:
    async with running(home, batches=BatchesConfig(disk_bytes=0)) as gateway:
        assert (await uploaded(gateway.client, b"x")).json()["error"]["code"] == "batches_off"
        answer = await gateway.client.post("/v1/messages/batches", json={"requests": []})
        assert answer.status_code == 400


# -- when they run ---------------------------------------------------------------------------------------------------


async def test_a_batch_waits_while_another_request_runs(home: Path) -> None:
    async with running(home, ["--step-ms", "10"]) as gateway:
        client, gate = gateway.client, gateway.app.services.batch_gate
        async with client.stream("POST", CHAT, json=chat(max_tokens=2000, stream=True)) as answer:
            assert answer.status_code == 200
            assert not await gate.is_open()
            batch_id = await begun(client, lines(3))

            async def is_open() -> bool:
                return (await batch(client, batch_id))["status"] == "in_progress"

            await poll(is_open)
            assert gateway.metrics.batch_requests_waiting() == 3
            assert gateway.link.in_flight == 1
        assert (await ended(client, batch_id))["request_counts"]["completed"] == 3
        assert gateway.metrics.batch_requests_waiting() == 0


async def test_requests_of_batches_take_no_place_in_the_queue(home: Path) -> None:
    models = [ModelConfig(name="m", path="m", max_running=1)]
    async with running(home, ["--step-ms", "20"], models=models) as gateway:
        gateway.app.services.admission.waiting_max = 0
        client = gateway.client
        batch_id = await begun(client, lines(1, max_tokens=200))
        await until(lambda: gateway.link.in_flight > 0)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert gateway.app.services.admission.is_idle
        await client.post(f"/v1/batches/{batch_id}/cancel")
        assert (await ended(client, batch_id))["status"] == "cancelled"


async def test_no_model_is_unloaded_for_a_batch_and_a_batchs_model_leaves_for_a_request(home: Path) -> None:
    models = [ModelConfig(name=name, path=name) for name in ("m", "other")]
    memory, limits = MemoryConfig(max_loaded=1), WorkerLimits(goodbye_s=patient(0.03), residency_s=0)
    async with running(home, ["--step-ms", "20"], models=models, memory=memory, limits=limits) as gateway:
        client, gate = gateway.client, gateway.app.services.batch_gate
        assert await gate.admits("m")
        assert (await client.post(CHAT, json=chat(model="other"))).status_code == 200
        assert await gate.is_open()
        assert not await gate.admits("m")
        assert await gate.admits("other")

        batch_id = await begun(client, lines(2, model="other", max_tokens=2000))
        await until(lambda: gateway.link.in_flight > 0)
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert gateway.pool.worker("m").state is State.READY
        assert (await batch(client, batch_id))["status"] == "in_progress"


async def test_a_machine_on_battery_runs_no_batch(home: Path) -> None:
    async with running(home) as gateway:
        services = gateway.app.services
        assert await BatchGate(services.admission, services.pool, lambda: False).is_open()
        assert not await BatchGate(services.admission, services.pool, lambda: True).is_open()


async def test_a_drained_daemon_leaves_its_batch_to_the_next(home: Path) -> None:
    async with running(home, ["--step-ms", "20"]) as first:
        batch_id = await begun(first.client, lines(20, max_tokens=10))

        async def has_some() -> bool:
            return (await batch(first.client, batch_id))["request_counts"]["completed"] > 0

        await poll(has_some)
    async with running(home) as second:
        done = await ended(second.client, batch_id)
        content = (await second.client.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
    assert done["status"] == "completed"
    assert sorted(json.loads(each)["custom_id"] for each in content) == sorted(f"r{at}" for at in range(20))
