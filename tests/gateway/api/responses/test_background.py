"""Background responses: clients that leave and come back, cancel, delete, and what a restart leaves."""

import asyncio
import gc
import itertools
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.access.key import Key, KeyFile
from gateway.api.responses import background, journal
from gateway.config.settings import ModelConfig, ServerConfig
from gateway.request.generation import Generation
from tests.gateway.harness import Gateway, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
TEXT = [["text", "Hel"], ["text", "lo"], ["finish", "stop"]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    """Its tokens take long enough for a client to leave between them."""
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "5"]) as running_gateway:
        yield running_gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def asking(tokens: int = 40, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", "max_output_tokens": tokens, "background": True} | fields


def text_of(tokens: int) -> str:
    return "".join(f"t{i} " for i in range(tokens))


def events(text: str) -> list[Any]:
    return [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block.startswith("event")]


def kinds(told: list[Any]) -> list[str]:
    """Types of events in their order; deltas in a row, which may be merged, are one."""
    return [kind for kind, _ in itertools.groupby(event["type"] for event in told)]


def contents(database: Path) -> bytes:
    """The database's file with its write-ahead log."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return b"".join(file.read_bytes() for file in files if file.exists())


async def ended(gateway: Gateway, response_id: str, headers: dict[str, str] | None = None) -> Any:
    async with asyncio.timeout(patient(60)):
        while True:
            found = (await gateway.client.get(f"{PATH}/{response_id}", headers=headers)).json()
            if found["status"] not in ("queued", "in_progress"):
                return found


# -- the official client ---------------------------------------------------------------------------------------------


async def test_a_response_is_polled_until_it_has_ended(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input="hi", max_output_tokens=40, background=True)
    assert made.status == "queued"
    assert made.background is True

    statuses, found = [made.status], made
    async with asyncio.timeout(patient(60)):
        while statuses[-1] in ("queued", "in_progress"):
            found = await client.responses.retrieve(made.id)
            statuses.append(found.status or "")
    assert statuses[-1] == "incomplete"
    assert found.output_text == text_of(40)
    assert found.usage is not None


async def test_a_client_that_leaves_comes_back_for_the_events_that_it_has_not_had(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="m", input="hi", max_output_tokens=200, background=True, stream=True)
    had = []
    async for event in stream:
        had.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert [event.type for event in had[:3]] == ["response.created", "response.queued", "response.in_progress"]
    made = had[0].response.id  # type: ignore[union-attr]
    again = await client.responses.retrieve(made, stream=True, starting_after=had[-1].sequence_number)
    rest = [event async for event in again]

    assert [event.sequence_number for event in (*had, *rest)] == list(range(len(had) + len(rest)))
    text = "".join(event.delta for event in (*had, *rest) if event.type == "response.output_text.delta")
    assert text == text_of(200)
    assert rest[-1].type == "response.incomplete"


async def test_it_is_cancelled_by_another_client_with_what_there_is(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    made = await client.responses.create(model="m", input="hi", max_output_tokens=5000, background=True)
    async with asyncio.timeout(patient(60)):
        while not (await client.responses.retrieve(made.id)).output_text:
            pass

    cancelled = await client.responses.cancel(made.id)

    assert cancelled.status == "cancelled"
    await until(lambda: gateway.app.services.admission.inside("m") == 0)
    found = await client.responses.retrieve(made.id)
    assert (found.status, found.output_text[:3]) == ("cancelled", "t0 ")
    assert (await client.responses.cancel(made.id)).status == "cancelled"


async def test_large_instructions_are_in_every_event_that_tells_them_and_kept_in_none(gateway: Gateway) -> None:
    """More than the events of one response may take: the first was gone before its reader came."""
    words = "x" * (5 * 1024 * 1024)
    told = events((await gateway.client.post(PATH, json=asking(tokens=3, instructions=words, stream=True))).text)

    telling = [event["response"] for event in told if "response" in event]
    assert [event["type"] for event in told][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [len(each["instructions"]) for each in telling] == [len(words)] * 4
    again = events((await gateway.client.get(f"{PATH}/{telling[0]['id']}?stream=true")).text)
    assert again == told


# -- streams ---------------------------------------------------------------------------------------------------------


async def test_every_reader_at_whatever_place_gets_the_same_events(gateway: Gateway) -> None:
    made = (await gateway.client.post(PATH, json=asking())).json()
    place = f"{PATH}/{made['id']}?stream=true"
    whole, *rest = await asyncio.gather(
        *(gateway.client.get(place + after) for after in ("", "&starting_after=0", "&starting_after=17"))
    )

    told = events(whole.text)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [events(answer.text) for answer in rest] == [told[1:], told[18:]]
    last = told[-1]["response"]
    assert last == await ended(gateway, made["id"])
    assert events((await gateway.client.get(f"{place}&starting_after={len(told) - 1}")).text) == []


async def test_its_events_are_those_of_any_stream_after_the_queue(gateway: Gateway) -> None:
    plain = events((await gateway.client.post(PATH, json=asking(background=False, stream=True))).text)
    queued = events((await gateway.client.post(PATH, json=asking(stream=True))).text)

    assert kinds(queued) == ["response.created", "response.queued", *kinds(plain)[1:]]
    assert queued[0]["response"]["status"] == "queued"
    assert queued[2]["response"]["status"] == "in_progress"


async def test_events_that_are_not_kept_are_not_made_up(gateway: Gateway) -> None:
    plain = (await gateway.client.post(PATH, json=asking(2, background=False))).json()
    gone = await gateway.client.get(f"{PATH}/{plain['id']}?stream=true")
    nowhere = await gateway.client.get(f"{PATH}/resp_x?stream=true")

    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "events_gone")
    assert nowhere.status_code == 404


@pytest.mark.parametrize("query", ["starting_after=3", "stream=true&starting_after=x", "stream=true&starting_after=-1"])
async def test_a_place_that_is_none_is_refused(gateway: Gateway, query: str) -> None:
    made = (await gateway.client.post(PATH, json=asking(2))).json()
    answer = await gateway.client.get(f"{PATH}/{made['id']}?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


# -- what it needs, and what it leaves -------------------------------------------------------------------------------


async def test_it_needs_the_store(gateway: Gateway, tmp_path: Path) -> None:
    refused = await gateway.client.post(PATH, json=asking(store=False))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    async with running(tmp_path, server=ServerConfig(response_store_bytes=0)) as without:
        assert (await without.client.post(PATH, json=asking())).status_code == 400


async def test_a_refusal_is_told_at_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await gateway.client.post(PATH, json=asking(model="nope"))).status_code == 404
    monkeypatch.setattr(background, "RUNNING_PER_KEY_MAX", 1)
    made = (await gateway.client.post(PATH, json=asking(5000))).json()
    refused = await gateway.client.post(PATH, json=asking())
    await gateway.client.post(f"{PATH}/{made['id']}/cancel")
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    await ended(gateway, made["id"])


async def test_one_that_has_ended_keeps_its_events_and_not_its_prompt(gateway: Gateway) -> None:
    made = (await gateway.client.post(PATH, json=asking(20, input="x" * 50_000))).json()
    await ended(gateway, made["id"])

    def has_none() -> bool:
        gc.collect()
        return not any(isinstance(each, Generation) for each in gc.get_objects())

    await until(has_none)
    again = await gateway.client.get(f"{PATH}/{made['id']}?stream=true&starting_after=0")
    assert kinds(events(again.text))[-1] == "response.incomplete"


async def test_what_ended_ones_were_asked_counts_as_their_events_do(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "ENDED_BYTES_MAX", 100_000)
    made = [(await gateway.client.post(PATH, json=asking(5, input="x" * 60_000))).json()["id"] for _ in range(2)]
    for each in made:
        await ended(gateway, each)
    await until(lambda: not gateway.app.services.requests.views())

    first, second = [await gateway.client.get(f"{PATH}/{each}?stream=true&starting_after=0") for each in made]
    assert (first.status_code, first.json()["error"]["code"]) == (400, "events_gone")
    assert second.status_code == 200


async def test_those_of_another_key_take_no_room_of_a_keys_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "ENDED_BYTES_MAX", 200_000)
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    secrets = [keys.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("a", "b")]
    mine, other = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:

        async def run(headers: dict[str, str], text: str) -> str:
            made = (await gateway.client.post(PATH, json=asking(5, input=text), headers=headers)).json()["id"]
            await ended(gateway, made, headers)
            return f"{PATH}/{made}?stream=true&starting_after=0"

        small = await run(mine, "x")
        large = [await run(other, "x" * 60_000) for _ in range(4)]
        await until(lambda: not gateway.app.services.requests.views())

        assert (await gateway.client.get(small, headers=mine)).status_code == 200
        statuses = [(await gateway.client.get(each, headers=other)).status_code for each in large]
        assert (statuses[0], statuses[-1]) == (400, 200)


async def test_everything_that_it_held_is_given_back(gateway: Gateway) -> None:
    large = "x" * 50_000
    made = (await gateway.client.post(PATH, json=asking(20, input=large))).json()
    services = gateway.app.services
    assert services.bodies.numbers.used_bytes >= len(large)
    assert [view.path for view in services.requests.views()] == [PATH]

    await ended(gateway, made["id"])

    await until(lambda: not services.bodies.numbers.used_bytes)
    assert not services.requests.views()
    assert services.admission.inside("m") == 0


async def test_deleted_while_it_runs_it_ends_and_is_kept_nowhere(gateway: Gateway) -> None:
    made = (await gateway.client.post(PATH, json=asking(5000))).json()

    assert (await gateway.client.delete(f"{PATH}/{made['id']}")).status_code == 200

    await until(lambda: gateway.app.services.admission.inside("m") == 0)
    assert (await gateway.client.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_a_conversation_goes_on_from_it_only_once_it_has_ended(gateway: Gateway) -> None:
    made = (await gateway.client.post(PATH, json=asking(5000))).json()
    early = await gateway.client.post(PATH, json=asking(2, previous_response_id=made["id"]))
    await gateway.client.post(f"{PATH}/{made['id']}/cancel")
    await ended(gateway, made["id"])

    assert early.json()["error"]["code"] == "previous_response_not_ended"
    later = await gateway.client.post(PATH, json=asking(2, previous_response_id=made["id"], background=False))
    assert later.status_code == 200


async def test_it_is_there_for_its_own_key_only(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    secrets = [keys.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("a", "b")]
    mine, other = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        made = (await gateway.client.post(PATH, json=asking(5000), headers=mine)).json()
        place = f"{PATH}/{made['id']}"
        for method, path in (
            ("GET", place), ("GET", f"{place}?stream=true"), ("POST", f"{place}/cancel"), ("DELETE", place),
        ):  # fmt: skip
            assert (await gateway.client.request(method, path, headers=other)).status_code == 404, path
        assert (await gateway.client.post(f"{place}/cancel", headers=mine)).json()["status"] == "cancelled"
        await ended(gateway, made["id"], mine)


# -- workers and gateways that end -----------------------------------------------------------------------------------


async def test_it_survives_the_death_of_its_worker_without_its_readers_noticing(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        made = (await gateway.client.post(PATH, json=asking(120))).json()
        reading = asyncio.create_task(gateway.client.get(f"{PATH}/{made['id']}?stream=true"))
        worker = gateway.pool.worker("m")
        await until(lambda: gateway.metrics.model("m").generation_tokens > 10)
        epoch = worker.epoch
        worker.kill()
        last = await ended(gateway, made["id"])
        told = events((await reading).text)

    assert worker.epoch > epoch
    assert last["output"][0]["content"][0]["text"] == text_of(120)
    assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == text_of(120)


async def test_one_that_ends_with_its_gateway_is_failed_and_keeps_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "JOURNALS_BYTES_MAX", 0)
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        made = (await gateway.client.post(PATH, json=asking(5000))).json()
        await until(lambda: gateway.metrics.model("m").generation_tokens > 10)
    async with running(tmp_path) as gateway:
        found = (await gateway.client.get(f"{PATH}/{made['id']}")).json()

    assert found["status"] == "failed"
    assert found["error"]["code"] == "server_error"
    assert found["output"][0]["content"][0]["text"].startswith("t0 t1 ")


async def test_one_whose_gateway_died_is_told_as_failed_with_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CHECKPOINT_S", 0.05)
    tmp_path, home = tmp_path / "a", tmp_path / "b"
    monkeypatch.setattr(journal, "JOURNALS_BYTES_MAX", 0)
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        made = (await gateway.client.post(PATH, json=asking(5000))).json()
        database = gateway.app.services.config.store_path
        await until(lambda: b"t0 t1 " in contents(database))
        # What a crash at this moment leaves.
        shutil.copytree(database.parent, home / "state")
    async with running(home) as gateway:
        found = (await gateway.client.get(f"{PATH}/{made['id']}")).json()
        gone = await gateway.client.get(f"{PATH}/{made['id']}?stream=true&starting_after=5")

    assert found["status"] == "failed"
    assert "restarted" in found["error"]["message"]
    assert found["output"][0]["content"][0]["text"].startswith("t0 t1 ")
    assert gone.json()["error"]["code"] == "events_gone"


async def test_one_that_waits_for_its_model_is_queued_and_cancelled_at_once(tmp_path: Path) -> None:
    models = [ModelConfig(name="m", path="m")]
    async with running(tmp_path, ["--load-s", "30"], models) as gateway:
        made = (await gateway.client.post(PATH, json=asking())).json()
        await until(lambda: gateway.app.services.requests.views()[0].state == "loading")
        assert (await gateway.client.get(f"{PATH}/{made['id']}")).json()["status"] == "queued"
        await gateway.client.post(f"{PATH}/{made['id']}/cancel")
        assert (await ended(gateway, made["id"]))["status"] == "cancelled"


# -- completion windows ----------------------------------------------------------------------------------------------


async def test_a_response_with_a_window_waits_while_another_request_runs(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=chat):
        window: Any = {"completion_window": "2h"}
        made = await client.responses.create(**asking(8), background_options=window)
        assert made.status == "queued"
        cancelled = await client.responses.create(**asking(8), background_options=window)
        assert (await client.responses.cancel(cancelled.id)).status == "cancelled"
        assert gateway.link.in_flight == 1
        assert (await client.responses.retrieve(made.id)).status == "queued"

    assert (await ended(gateway, made.id))["output"][0]["content"][0]["text"] == text_of(8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": False, "background_options": {"completion_window": "2h"}}, "completion_window"),
        ({"stream": True, "background_options": {"completion_window": "8h"}}, "completion_window"),
        ({"background_options": {"completion_window": "1h"}}, "completion_window"),
        ({"background_options": {"continuation_id": "a"}}, "continuation_id"),
    ],
)
async def test_options_of_the_background_that_are_not_held_are_refused(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.client.post(PATH, json=asking(**fields))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"background_options.{param}")
