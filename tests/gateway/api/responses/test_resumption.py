"""Background responses over a restart of their gateway: what is on the disk, and how the next one goes on."""

import asyncio
import json
import re
import shutil
import stat
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.access.key import Key, KeyFile
from gateway.api.responses import journal as journals
from gateway.api.responses import resumption
from gateway.api.responses.background import Background, keep_nothing
from gateway.api.responses.encoder import ResponseRun, echo
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.journal import (
    LOST_BEGIN,
    MAGIC,
    BeginRecord,
    DeltaRecord,
    JournaledRequest,
    NotUnderstood,
    StartRecord,
    framed,
    parsed,
)
from gateway.api.responses.request import decode_responses, toolbox
from gateway.api.responses.response import Response
from gateway.api.responses.resumption import LOST_EVENTS_MAX, ReplayedResponse, replay
from gateway.config.settings import ModelConfig
from gateway.disk_and_clock import Disk
from gateway.errors import Unavailable
from gateway.media.read_media import quota_bytes
from protocol.from_worker import Delta, DeltaKind, Finish, TokenLogprob, ToolCallDelta
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling, TextPrompt
from tests.gateway.harness import Gateway, running, until
from tests.gateway.web.visitors import log_in
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
SLOW = ["--step-ms", "5"]
TOKENS = 100


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def asking(tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", "max_output_tokens": tokens, "background": True} | fields


def held(home: Path) -> str:
    """The input of a response whose last token comes after `let_end`."""
    return f"hold {home / 'may_end'}"


def let_end(home: Path) -> None:
    (home / "may_end").touch()


def text_of(tokens: int) -> str:
    return "".join(f"t{i} " for i in range(tokens))


def events(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block.startswith("event")]
    return [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


def said(told: list[Any]) -> str:
    return "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")


def files(home: Path) -> list[Path]:
    return sorted((home / "state" / "background").glob("*"))


async def nothing_to_store() -> None:
    pass


def bare() -> Response:
    request, _ = decode_responses(b'{"model": "m", "input": "hi"}')
    return echo(request, toolbox(request), ModelConfig(name="m", path="m"), "resp_0", 7, True)


async def started(gateway: Gateway, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The id of one that has said something, which then is in its journal."""
    made = (await gateway.client.post(PATH, json=asking(5000) | fields, headers=headers)).json()
    async with gateway.client.stream("GET", f"{PATH}/{made['id']}?stream=true", headers=headers) as stream:
        async for line in stream.aiter_lines():
            if line == "event: response.output_text.delta":
                return made["id"]
    raise AssertionError("it ended without a word")


async def heard(
    gateway: Gateway, response_id: str, after: int | None = None, pieces: list[str] | None = None
) -> list[Any]:
    """Events of it, until the last or until its gateway is gone; `pieces` gets what has arrived."""
    pieces = [] if pieces is None else pieces
    place = f"{PATH}/{response_id}?stream=true" + ("" if after is None else f"&starting_after={after}")
    try:
        async with gateway.client.stream("GET", place) as stream:
            assert stream.status_code == 200
            async for text in stream.aiter_text():
                pieces.append(text)
    except httpx2.TransportError:
        pass
    told = "".join(pieces)
    return events(told[: told.rfind("\n\n") + 2])


async def ended(gateway: Gateway, response_id: str, headers: dict[str, str] | None = None) -> Any:
    async with asyncio.timeout(patient(60)):
        while True:
            found = (await gateway.client.get(f"{PATH}/{response_id}", headers=headers)).json()
            if found["status"] not in ("queued", "in_progress"):
                return found


async def test_a_response_goes_on_after_a_restart_at_the_next_event(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
        pieces: list[str] = []
        reading = asyncio.create_task(heard(gateway, made, pieces=pieces))
        await until(lambda: gateway.metrics.model("m").generation_tokens > 30)
        await until(lambda: "output_text.delta" in "".join(pieces))
    had = await reading
    assert had[-1]["type"] == "response.output_text.delta"

    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        rest = await heard(gateway, made, had[-1]["sequence_number"])
        whole = await heard(gateway, made)
        last = await ended(gateway, made)

    told = [*had, *rest]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told == whole
    assert said(told) == text_of(TOKENS)
    assert last == told[-1]["response"]
    assert (last["status"], last["usage"]["output_tokens"]) == ("incomplete", TOKENS)


async def test_large_fields_are_the_same_in_all_events_after_a_restart(tmp_path: Path) -> None:
    asked = {"instructions": [{"role": "system", "content": "x" * 200_000}], "user": "y" * 200_000}
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path), **asked)
        pieces: list[str] = []
        reading = asyncio.create_task(heard(gateway, made, pieces=pieces))
        await until(lambda: "output_text.delta" in "".join(pieces))
    had = await reading

    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        whole = await heard(gateway, made)
        last = await ended(gateway, made)

    assert whole[: len(had)] == had
    for each in (whole[0]["response"], whole[-1]["response"], last):
        assert each["instructions"][0]["content"] == "x" * 200_000
        assert each["user"] == "y" * 200_000


async def test_no_client_has_more_than_what_a_killed_gateway_leaves(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    async with running(first, SLOW) as gateway:
        made = await started(gateway)
        had: list[Any] = []
        async with gateway.client.stream("GET", f"{PATH}/{made}?stream=true") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    had.append(json.loads(line[6:]))
                if len(said(had)) > 100:
                    # What a crash at this moment leaves.
                    shutil.copytree(first / "state", second / "state")
                    break
        await gateway.client.post(f"{PATH}/{made}/cancel")
        await ended(gateway, made)

    async with running(second, SLOW) as gateway:
        reading = asyncio.create_task(heard(gateway, made, had[-1]["sequence_number"]))
        await until(lambda: gateway.metrics.model("m").generation_tokens > 30)
        await gateway.client.post(f"{PATH}/{made}/cancel")
        rest = await reading

    told = said([*had, *rest])
    assert len(told) > len(said(had))
    assert text_of(5000).startswith(told)
    assert [event["sequence_number"] for event in (*had, *rest)] == list(range(len(had) + len(rest)))


async def test_it_goes_on_over_several_restarts_and_the_death_of_a_worker(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=500)
    async with running(tmp_path, SLOW) as gateway:
        await until(lambda: gateway.metrics.model("m").generation_tokens > 10)
        gateway.pool.worker("m").kill()
        await until(lambda: gateway.metrics.model("m").generation_tokens > 30)
    async with running(tmp_path, SLOW) as gateway:
        whole = await heard(gateway, made)

    assert said(whole) == text_of(500)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))


async def test_one_that_waits_for_its_model_goes_on_waiting(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "30"], [ModelConfig(name="m", path="m")]) as gateway:
        made = (await gateway.client.post(PATH, json=asking(5))).json()["id"]
        await until(lambda: gateway.app.services.requests.views()[0].state == "loading")
    async with running(tmp_path) as gateway:
        told = await heard(gateway, made)

    assert [event["type"] for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert said(told) == text_of(5)


def test_everything_that_is_said_is_told_again_alike() -> None:
    body = asking(
        tools=[{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "c"}],
        include=["reasoning.encrypted_content"],
        instructions=[{"role": "system", "content": "be brief"}],
        metadata={"a": "b"},
    )
    request, _ = decode_responses(json.dumps(body).encode())
    box = toolbox(request)
    response = echo(request, box, ModelConfig(name="m", path="m"), "resp_0", 7, True)
    image = Media("image", b"d", b"bytes", param="input[0]")
    generate = Generate(1, ChatPrompt([{"role": "user", "content": "hi"}], media=(image,)), Sampling(seed=3))
    asked = JournaledRequest("k", "m", "m", "req", response, generate, request.items, box.forms, True, 10, 1.5)

    def fresh(said: JournaledRequest) -> Background:
        run = ResponseRun(
            said.response, ResponseOutput("0", said.forms, said.is_sealed), lambda: 0, keep_nothing, lambda _: None
        )
        return Background("k", run, nothing_to_store)

    logprob = TokenLogprob(b"o", -0.25, ((b"o", -0.25), (b"\xff", -3.0)))
    f, c = ToolCallDelta(0, "call_f", "f"), ToolCallDelta(1, "call_c", "c")
    steps = [
        [Delta(1, DeltaKind.REASONING, "hm", (1, 2))],
        [Delta(1, text="so", token_ids=(3,), logprobs=(logprob,)), Delta(1, DeltaKind.TOOL_BEGIN, tool=f)],
        [Delta(1, DeltaKind.TOOL_ARGS, '{"a"', (4,), f), Delta(1, DeltaKind.TOOL_ARGS, ": 1}", (5,), f)],
        [Delta(1, DeltaKind.TOOL_END, tool=f), Delta(1, DeltaKind.TOOL_BEGIN, tool=c)],
        [Delta(1, DeltaKind.TOOL_ARGS, '{"input": "x\\u00', (6, 7), c)],
    ]
    first = fresh(asked)
    for data in (first.encoder.queued(), first.encoder.started(), *map(first.encoder.encode, steps)):
        first.events.add(data)
    content = parsed(MAGIC + b"".join(map(framed, (asked, BeginRecord("b"), StartRecord(), *map(DeltaRecord, steps)))))
    second = fresh(content.request)
    replayed = replay(second, [*content.records, BeginRecord("b")])

    assert msgspec.json.encode(content.request) == msgspec.json.encode(asked)
    assert replayed.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert bytes(second.events._data) == bytes(first.events._data)
    assert second.run.snapshot() == first.run.snapshot()
    # The rest comes out alike too, of a string that was cut within an escape.
    rest = [
        Delta(1, DeltaKind.TOOL_ARGS, 'e9"}', (8,), c),
        Delta(1, DeltaKind.TOOL_END, tool=c, finish=Finish.TOOL_CALLS),
    ]
    assert second.encoder.encode(rest) + second.encoder.end() == first.encoder.encode(rest) + first.encoder.end()


def test_what_was_left_out_of_a_prompt_stays_left_out_after_a_restart() -> None:
    run = ResponseRun(bare(), ResponseOutput("0", {}, False), lambda: 0, keep_nothing, lambda _: None)
    generate = Generate(1, TextPrompt("hi"), Sampling(), truncate=-1)
    written = [DeltaRecord([Delta(1, text="x", token_ids=(token,))], (3, 900)) for token in (5, 6)]
    replayed = replay(Background("k", run, nothing_to_store), [BeginRecord("b"), StartRecord(), *written])
    expected = Generate(7, TextPrompt("hi"), Sampling(), truncate=-1, resume=(5, 6), truncated=(3, 900), deadline_ms=9)
    assert replayed.rest_of(generate, 7, 9) == expected
    # Without a token of it, the next worker decides.
    assert ReplayedResponse().rest_of(generate, 7, 9).truncated is None


async def test_no_event_number_comes_again_if_a_power_cut_left_the_request_alone(tmp_path: Path) -> None:
    generate = Generate(1, ChatPrompt([{"role": "user", "content": "hi"}]), Sampling())
    request = JournaledRequest("k", "m", "m", "req", bare(), generate, [], {}, False, 10, 1.5)
    path = tmp_path / "resp_0.journal"
    path.write_bytes(MAGIC + framed(request))
    background = Background(
        "k",
        ResponseRun(bare(), ResponseOutput("0", {}, False), lambda: 0, keep_nothing, lambda _: None),
        nothing_to_store,
    )
    kept = journals.ResponseJournals(tmp_path, lambda: 1 << 20, Counter())
    await kept.reopen(path, parsed(path.read_bytes()), background.events.add).begin()
    kept.close()

    first, second = parsed(path.read_bytes()).records
    assert first == LOST_BEGIN
    replay(background, [first, second])
    (number,) = re.findall(rb'"sequence_number":(\d+)', background.encoder.started())
    assert int(number) > LOST_EVENTS_MAX


# -- what lies on the disk ---------------------------------------------------------------------------------------------


async def test_its_file_is_private_and_goes_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
        (file,) = files(tmp_path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert (await gateway.client.delete(f"{PATH}/{made}")).status_code == 200
        assert files(tmp_path) == []
        await until(lambda: gateway.app.services.admission.inside("m") == 0)

        whole = (await gateway.client.post(PATH, json=asking(5))).json()["id"]
        cancelled = await started(gateway)
        await gateway.client.post(f"{PATH}/{cancelled}/cancel")
        for each in (whole, cancelled):
            await ended(gateway, each)
        await until(lambda: files(tmp_path) == [])


async def test_without_room_a_response_ends_with_its_gateway_and_that_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "JOURNALS_BYTES_MAX", 4000)
    async with running(tmp_path, SLOW) as gateway:
        large = await started(gateway, input="x" * 5000)
        assert files(tmp_path) == []
        small = await started(gateway, max_output_tokens=400)
        reading = asyncio.create_task(heard(gateway, small))
        # It fills what there is by what it says, and then goes on without.
        await until(lambda: files(tmp_path) == [])
        assert said(await reading) == text_of(400)
        assert gateway.metrics.store_problems["journal"] == 2
    async with running(tmp_path) as gateway:
        assert (await ended(gateway, large))["status"] == "failed"


async def test_a_disk_that_fails_costs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(disk: Disk, file: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
        monkeypatch.setattr(Disk, "write_all", full)
        let_end(tmp_path)
        whole = await heard(gateway, made)
        assert said(whole) == text_of(TOKENS)
        refused = (await gateway.client.post(PATH, json=asking(20))).json()["id"]
        assert said(await heard(gateway, refused)) == text_of(20)
        await until(lambda: files(tmp_path) == [])
        assert gateway.metrics.store_problems["journal"] == 2


async def test_a_journal_that_cannot_be_reopened_is_deleted_and_its_response_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(disk: Disk, file: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    first, second = tmp_path / "a", tmp_path / "b"
    async with running(first, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
        shutil.copytree(first / "state", second / "state")
    monkeypatch.setattr(Disk, "write_all", full)
    let_end(tmp_path)
    async with running(second, SLOW) as gateway:
        assert (await ended(gateway, made))["status"] == "incomplete"
        await until(lambda: files(second) == [])
        assert gateway.metrics.store_problems["journal"] == 1


async def test_a_disk_that_hangs_holds_up_events_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    write = Disk.write_all

    def hang(disk: Disk, file: int, data: bytes) -> None:
        release.wait(patient(60))
        write(disk, file, data)

    monkeypatch.setattr(journals, "WRITE_TIMEOUT_S", 0.1)
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=100)
        monkeypatch.setattr(Disk, "write_all", hang)
        try:
            assert said(await heard(gateway, made)) == text_of(100)
        finally:
            release.set()
        await until(lambda: files(tmp_path) == [])


CUT = [b"", b"\x07", b"\x10\x00\x00\x00abcd" + b"x" * 16, framed(BeginRecord("b"))[:-1], bytes(100)]


@pytest.mark.parametrize("end", CUT)
def test_what_follows_the_last_whole_record_is_left_out(end: bytes) -> None:
    asked = JournaledRequest(
        "k", "m", "m", "req", bare(), Generate(1, TextPrompt("hi"), Sampling()), [], {}, False, 10, 1.5
    )
    whole = MAGIC + framed(asked) + framed(BeginRecord("b"))
    content = parsed(whole + end)
    assert (content.records, content.whole_bytes) == ([BeginRecord("b")], len(whole))


async def test_a_cut_end_is_written_over(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole + framed(DeltaRecord([]))[:-1])

    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        await until(lambda: len(parsed(file.read_bytes()).records) > len(parsed(whole).records) + 1)
        assert said(await heard(gateway, made)) == text_of(TOKENS)


@pytest.mark.parametrize(
    "content", [b"", b"mlxd-journal 2\n", MAGIC, MAGIC + framed(BeginRecord("b")), MAGIC + b"\xff" * 64]
)
def test_a_file_of_another_form_is_not_understood(content: bytes) -> None:
    with pytest.raises(NotUnderstood):
        parsed(content)


async def test_a_file_that_is_not_understood_is_deleted_and_its_response_failed(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
    (file,) = files(tmp_path)
    file.write_bytes(b"mlxd-journal 2\n")

    async with running(tmp_path) as gateway:
        assert (await ended(gateway, made))["status"] == "failed"
    assert files(tmp_path) == []


async def test_after_a_power_cut_no_number_means_two_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    async with running(first, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
        shutil.copytree(first / "state", second / "state")
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another")
    let_end(tmp_path)
    async with running(second, SLOW) as gateway:
        had = await gateway.client.get(f"{PATH}/{made}?stream=true&starting_after=20")
        last = await ended(gateway, made)

    # What a client has had beyond the file, it may have had otherwise.
    assert (had.status_code, had.json()["error"]["code"]) == (400, "events_gone")
    assert last["output"][0]["content"][0]["text"] == text_of(TOKENS)


async def test_a_machine_that_ends_in_order_leaves_no_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
    monkeypatch.setattr(Disk, "boot_id", lambda self: "another")
    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        told = await heard(gateway, made, 4)
    assert [event["sequence_number"] for event in told] == list(range(5, 5 + len(told)))


# -- who may go on -----------------------------------------------------------------------------------------------------


async def test_a_key_that_is_revoked_meanwhile_asks_for_nothing_more(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    secrets = [keys.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("a", "b")]
    mine, other = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    async with running(tmp_path, SLOW) as gateway:
        kept, lost = [
            (await gateway.client.post(PATH, json=asking(400), headers=headers)).json()["id"]
            for headers in (mine, other)
        ]
        await until(lambda: gateway.metrics.model("m").generation_tokens > 10)
        assert [each.key for each in gateway.app.services.requests.views()] == ["a", "b"]
    keys.revoke("b")
    async with running(tmp_path, SLOW) as gateway:
        assert (await gateway.client.get(f"{PATH}/{kept}?stream=true", headers=mine)).status_code == 200
        assert (await gateway.client.get(f"{PATH}/{lost}", headers=mine)).status_code == 404
        last = await ended(gateway, kept, mine)
        assert last["output"][0]["content"][0]["text"] == text_of(400)
        # It is charged once, by the gateway that saw its end.
        assert gateway.metrics.key("a").generation_tokens == 400
    assert files(tmp_path) == []


async def test_what_was_asked_without_a_key_ends_once_there_are_keys(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    keys.create(Key(name="a", prefix="", salt="", hash=""))
    async with running(tmp_path, SLOW) as gateway:
        await until(lambda: files(tmp_path) == [])
        found = gateway.app.services.requests.views()
        assert found == []
    keys.path.unlink()
    async with running(tmp_path, SLOW) as gateway:
        last = await ended(gateway, made)
    assert last["status"] == "failed"
    assert "without an API key" in last["error"]["message"]


async def test_a_response_to_a_session_of_the_page_goes_on_once_there_are_keys(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, await log_in(gateway), max_output_tokens=TOKENS, input=held(tmp_path))
    KeyFile(tmp_path / "keys" / "keys.json").create(Key(name="a", prefix="", salt="", hash=""))
    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        last = await ended(gateway, made, await log_in(gateway))
    assert last["status"] == "incomplete", last["error"]
    assert last["output"][0]["content"][0]["text"] == text_of(TOKENS)


async def test_media_of_a_response_that_goes_on_count_for_its_key(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    secret, _ = [keys.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("a", "b")]
    mine = {"authorization": f"Bearer {secret}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORyBjYXQ="}
    never = ["--load-s", "60"]
    async with running(tmp_path, worker="seeing", options=never) as gateway:
        body = asking(5, input=[{"role": "user", "content": [image]}])
        reply = await gateway.client.post(PATH, json=body, headers=mine)
        assert reply.status_code == 200, reply.text
        await until(lambda: len(files(tmp_path)) == 1)
    limit = 100 << 20
    async with running(tmp_path, worker="seeing", options=never) as gateway:
        gateway.app.services.media.limit_bytes = limit
        await until(lambda: [each.key for each in gateway.app.services.requests.views()] == ["a"])
        for owner, is_full in (("a", True), ("b", False)):
            lease = gateway.app.services.media.lease()
            lease.owner = owner
            with pytest.raises(Unavailable) if is_full else nullcontext():
                lease.grow(quota_bytes(limit, has_others=True))
            lease.close()


async def test_one_key_fills_half_of_the_journals_while_there_are_others(tmp_path: Path) -> None:
    def journal(name: str, owner: str) -> journals.ResponseJournal:
        return journals.ResponseJournal(kept, tmp_path / name, lambda _: None, owner)

    mib, others = 1 << 20, [False]
    kept = journals.ResponseJournals(tmp_path, lambda: 200 * mib, Counter(), lambda: others[0])
    try:
        assert kept.reserve(journal("1", "a"), 90 * mib)
        others[0] = True
        mine = journal("2", "a")
        assert not kept.reserve(mine, 20 * mib)
        assert kept.reserve(journal("3", "b"), 20 * mib)
        others[0] = False
        assert kept.reserve(mine, 20 * mib)
        await kept.close_file(mine, is_kept=False)
        others[0] = True
        assert kept.reserve(journal("4", "a"), 10 * mib)
    finally:
        kept.close()


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([ModelConfig(name="other", path="m")], "does not exist"),
        ([ModelConfig(name="m", path="elsewhere")], "other weights"),
    ],
)
async def test_what_another_model_would_say_is_not_said(tmp_path: Path, models: list[ModelConfig], reason: str) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
    async with running(tmp_path, models=models) as gateway:
        last = await ended(gateway, made)

    assert last["status"] == "failed"
    assert reason in last["error"]["message"]
    assert last["output"][0]["content"][0]["text"].startswith("t0 t1 ")
    assert files(tmp_path) == []


async def test_what_is_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
    monkeypatch.setattr(journals, "JOURNALS_BYTES_MAX", 0)
    async with running(tmp_path) as gateway:
        assert (await ended(gateway, made))["status"] == "failed"
        assert (await gateway.client.post(PATH, json=asking(5))).status_code == 200
        assert files(tmp_path) == []


async def test_one_that_may_be_what_ends_its_gateways_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumption, "FRUITLESS_DAEMONS_MAX", 2)
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
    for _ in range(2):
        async with running(tmp_path, ["--load-s", "30"]) as gateway:
            assert (await gateway.client.get(f"{PATH}/{made}")).json()["status"] == "in_progress"
    async with running(tmp_path) as gateway:
        assert "restarted too often" in (await ended(gateway, made))["error"]["message"]


async def test_one_that_is_deleted_while_its_gateway_ends_does_not_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway)
        gateway.app.drain()
        gateway.app.leave()
        await until(lambda: gateway.app.services.admission.inside("m") == 0)
        assert len(files(tmp_path)) == 1
        assert (await gateway.client.delete(f"{PATH}/{made}")).status_code == 200
        assert files(tmp_path) == []
    async with running(tmp_path) as gateway:
        assert (await gateway.client.get(f"{PATH}/{made}")).status_code == 404


async def test_one_whose_beginning_was_not_stored_yet_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=TOKENS, input=held(tmp_path))
    for file in (tmp_path / "state").glob("responses.sqlite*"):
        file.unlink()
    let_end(tmp_path)
    async with running(tmp_path, SLOW) as gateway:
        assert said(await heard(gateway, made)) == text_of(TOKENS)
        await ended(gateway, made)
        listed = (await gateway.client.get(f"{PATH}/{made}/input_items")).json()
    assert listed["data"][0]["content"][0]["text"] == held(tmp_path)


@pytest.mark.soak
async def test_one_that_had_ended_is_not_generated_again(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    async with running(first, SLOW) as gateway:
        made = await started(gateway, max_output_tokens=400)
        shutil.copytree(first / "state" / "background", second / "state" / "background")
        held = files(second)
        await ended(gateway, made)
        await until(lambda: files(first) == [])
    shutil.copy(first / "state" / "responses.sqlite", second / "state" / "responses.sqlite")
    async with running(second) as gateway:
        assert (await ended(gateway, made))["status"] == "incomplete"
        assert gateway.metrics.model("m").generation_tokens == 0
    assert held
    assert files(second) == []
