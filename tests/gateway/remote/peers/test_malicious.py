"""A peer that lies: what it sends costs neither memory, nor other requests, nor the budget of a key."""

import asyncio
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.config.remote_settings import PeerConfig
from gateway.config.settings import ModelConfig
from gateway.remote.peers.peer import REFUSAL_BYTES_MAX, PeerDeclined, PeerNode
from gateway.remote.peers.peer_models import Forms
from gateway.remote.peers.validation import PeerClaims
from protocol.codec import MAX_FRAME_BYTES, MalformedFrame, Unsendable
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    Delta,
    DeltaKind,
    Finish,
    Progress,
    PromptLogprob,
    PromptPart,
    Ready,
    Step,
    ToolCallDelta,
    Usage,
)
from protocol.peering import FrameReader, PeerModel, PeerRequest, PeerUp
from protocol.prompts import TextPrompt
from protocol.stats import Stats
from protocol.to_worker import Generate, Sampling, Tokenize
from tests.gateway.harness import Gateway, chat, until
from tests.gateway.remote.peers.scripted import MODEL, Scripted, answer, beside
from tests.support.pool import tokens
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Alone:
    """A node of a scripted peer, without a gateway."""

    node: PeerNode
    server: asyncio.Server

    async def close(self) -> None:
        await self.node.close()
        self.server.close()


async def alone(scripted: Scripted, path: Path) -> Alone:
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    key_file = path / "b.key"
    key_file.write_text("secret\n")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return Alone(PeerNode(PeerConfig(name="b", url=url, key_file=str(key_file)), 1), server)


async def nothing(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n")


async def test_a_refusal_is_not_unpacked_and_only_its_beginning_is_read(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(16)) + packer.flush()
    assert len(bomb) > 2 * REFUSAL_BYTES_MAX

    async def refuse(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 500 X\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(bomb) + bomb)

    peer = await alone(Scripted(refuse), tmp_path)
    try:
        with pytest.raises(PeerDeclined) as refused:
            async with peer.node.generate(b"\x93\xa1m\x90\xc0", {}):
                pass
        assert refused.value.args[0].startswith("HTTP 500: \x1f")
    finally:
        await peer.close()


async def test_cookies_of_a_peer_are_not_kept(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(b"HTTP/1.1 503 X\r\nset-cookie: a=b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    key_file = tmp_path / "b.key"
    key_file.write_text("secret\n")
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    peer = Alone(PeerNode(PeerConfig(name="b", url=url, key_file=str(key_file)), 1), server)
    try:
        for _ in range(2):
            assert not await peer.node.poll()
        assert [b"cookie" in head for head in heads] == [False, False]
    finally:
        await peer.close()


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
READY = Ready(-1, "", 1000, 4, 100, 1, 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        replace(MODEL, wait_s=float("nan")),
        replace(MODEL, load_s=float("inf")),
        replace(MODEL, prefill_rate=-1.0),
        replace(MODEL, context=-1),
        replace(MODEL, slots=1 << 60),
        replace(MODEL, sampling={"temperature": float("nan")}),
        replace(MODEL, ready=replace(READY, weights_bytes=-1)),
    ],
)
async def test_a_status_with_a_number_that_cannot_be_is_refused(tmp_path: Path, bad: PeerModel) -> None:
    scripted = Scripted(nothing, models=[replace(MODEL, ready=READY)])
    peer = await alone(scripted, tmp_path)
    try:
        await peer.node.poll()
        assert peer.node.problem == ""
        scripted.models = [bad]
        await peer.node.poll()
        assert "not understood" in peer.node.problem
    finally:
        await peer.close()


RID = 7
ASKED = Generate(RID, TextPrompt("hi"), Sampling(), max_tokens=5)
TOOL = ToolCallDelta(0, "call", "f")
ENTRY = PromptLogprob(5, b"a", -0.5, 1, ((5, b"a", -0.5),))


def check(stream: PeerClaims, message: Accepted | Progress | Delta) -> None:
    match message:
        case Accepted():
            stream.check_accepted(message)
        case Progress():
            stream.check_progress(message)
        case Delta():
            stream.check(message)


def claims(asked: Generate = ASKED) -> PeerClaims:
    made = PeerClaims(MODEL)
    made.expect(asked)
    return made


@pytest.mark.parametrize(
    "bad",
    [
        Accepted(RID, -1),
        Accepted(RID, 1001),
        Accepted(RID, 5, left_out=(-1, 3)),
        Accepted(RID, 5, left_out=(1, 1 << 60)),
        Progress(RID, -1, 10),
        Progress(RID, 11, 10),
        Progress(RID, 1, 10, -5),
        Progress(RID, 1, 1 << 40),
        Delta(RID, usage=Usage(-1, 0, 0)),
        Delta(RID, usage=Usage(1001, 0, 0)),
        Delta(RID, usage=Usage(5, 6, 0)),
        Delta(RID, usage=Usage(5, 0, -1)),
        Delta(RID, usage=Usage(5, 0, 6)),
        Delta(RID, usage=Usage(5, 0, 0, queue_ms=float("nan"))),
        Delta(RID, usage=Usage(5, 0, 0, image_tokens=-1)),
        Delta(RID, text="x", token_ids=(1, 2, 3, 4, 5, 6)),
        Delta(RID, text="x", token_ids=(-1,)),
        Delta(RID, text="x" * (1 << 20), token_ids=(1,)),
        Delta(RID, DeltaKind.TOOL_BEGIN, tool=replace(TOOL, name="f" * (1 << 20))),
        Delta(RID, DeltaKind.TOOL_BEGIN),
        Delta(RID, DeltaKind.TOOL_ARGS, "{", tool=TOOL),
        Delta(RID, DeltaKind.TOOL_END, tool=TOOL),
        Delta(RID, text="x", token_ids=(1, 2, 3), ending_ids=(4, 5, 6)),
        Delta(RID, finish=Finish.STOP, ending_ids=(-1,)),
        Delta(RID, prompt=PromptPart((1, 2))),
        Delta(RID, prompt=PromptPart(logprobs=(ENTRY,))),
    ],
)
def test_what_cannot_be_true_of_a_request_is_malformed(bad: Accepted | Progress | Delta) -> None:
    with pytest.raises(MalformedFrame):
        check(claims(), bad)


def test_tokens_add_up_over_deltas_and_with_those_that_an_earlier_place_sent() -> None:
    stream = claims(replace(ASKED, resume=(1, 2, 3)))
    stream.check(Delta(RID, text="x", token_ids=(4,)))
    stream.check(Delta(RID, text="x", token_ids=(5,)))
    with pytest.raises(MalformedFrame):
        stream.check(Delta(RID, text="x", token_ids=(6,)))


@pytest.mark.parametrize(
    "bad",
    [
        Delta(RID, text="x", prompt=PromptPart((1, 2))),
        Delta(RID, prompt=PromptPart()),
        Delta(RID, prompt=PromptPart((1, 1 << 40))),
        Delta(RID, prompt=PromptPart(logprobs=(replace(ENTRY, token=bytes(4096)),))),
        Delta(RID, prompt=PromptPart((1,) * 1001)),
        Delta(RID, prompt=PromptPart(logprobs=(ENTRY,) * 999)),
        Delta(RID, prompt=PromptPart(logprobs=(replace(ENTRY, id=-1),))),
        Delta(RID, prompt=PromptPart(logprobs=(replace(ENTRY, rank=-1),))),
        Delta(RID, prompt=PromptPart(logprobs=(replace(ENTRY, top=ENTRY.top * 2),))),
    ],
)
def test_of_a_prompt_no_more_is_told_than_was_asked_for(bad: Delta) -> None:
    stream = claims(replace(ASKED, prompt_ids=True, prompt_logprobs=1, prompt_scored=2))
    with pytest.raises(MalformedFrame):
        stream.check(bad)
    stream = claims(replace(ASKED, prompt_ids=True, prompt_logprobs=1, prompt_scored=2))
    stream.check(Delta(RID, prompt=PromptPart((1,) * 1000)))
    stream.check(Delta(RID, prompt=PromptPart(logprobs=(ENTRY,) * 998)))
    with pytest.raises(MalformedFrame):
        stream.check(Delta(RID, prompt=PromptPart((1,))))


def test_a_tool_call_goes_on_where_the_stream_before_was_lost() -> None:
    before, after = claims(), claims(replace(ASKED, resume=(1,)))
    before.check(Delta(RID, DeltaKind.TOOL_BEGIN, tool=TOOL))
    after.calls |= before.calls
    after.check(Delta(RID, DeltaKind.TOOL_ARGS, "{}", tool=TOOL))
    after.check(Delta(RID, DeltaKind.TOOL_END, tool=TOOL))
    with pytest.raises(MalformedFrame):
        after.check(Delta(RID, DeltaKind.TOOL_ARGS, "{}", tool=TOOL))


def test_a_whole_answer_is_true() -> None:
    stream = claims()
    stream.check_accepted(Accepted(RID, 1000))
    stream.check_progress(Progress(RID, 1000, 1000, 10))
    stream.check(Delta(RID, text="x", token_ids=(1, 2)))
    stream.check(Delta(RID, DeltaKind.TOOL_BEGIN, tool=TOOL))
    stream.check(Delta(RID, DeltaKind.TOOL_ARGS, "{}", (3, 4), replace(TOOL, name="")))
    stream.check(Delta(RID, DeltaKind.TOOL_END, tool=TOOL))
    stream.check(Delta(RID, finish=Finish.TOOL_CALLS, usage=Usage(1000, 10, 5, queue_ms=0.5)))
    stream.check(Delta(RID, finish=Finish.ERROR, failure=Failure(Code.INTERNAL, "x")))


def test_a_frame_is_no_larger_than_what_was_asked_for_can_be() -> None:
    reader = FrameReader(claims().frame_bytes)
    with pytest.raises(MalformedFrame):
        list(reader.feed((2 << 20).to_bytes(4, "big")))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        Delta(0, DeltaKind.TOOL_ARGS, "x"),
        Delta(0, text="hi", token_ids=tuple(range(1000))),
        Delta(0, finish=Finish.STOP, usage=Usage(-(10**15), -5, -(10**15))),
    ],
    ids=["arguments without a call", "more tokens than asked for", "a negative usage"],
)
async def test_a_lie_is_a_failure_of_the_peer_and_no_error_of_this_daemon(bad: Delta, is_streamed: bool) -> None:
    async def lie(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        rid = request.generates[0].rid
        messages: list[PeerUp] = [Accepted(rid, 5), Step(0, 1, [replace(bad, rid=rid)])]
        writer.write(answer(*messages))

    async with beside(Scripted(lie)) as gateway:
        services = gateway.app.services
        client = asyncio.create_task(
            gateway.client.post("/v1/chat/completions", json=chat(max_tokens=5, stream=is_streamed))
        )
        try:
            await until(lambda: services.fleet.nodes["b"].failures["malformed"] > 0)
        finally:
            client.cancel()
        assert gateway.metrics.unhandled_errors == 0


async def test_a_peer_that_refuses_is_not_asked_again_at_once_by_its_own_name_either() -> None:
    async def refuse(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")

    scripted = Scripted(refuse)
    async with beside(scripted) as gateway:
        node = gateway.app.services.fleet.nodes["b"]
        client = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat(model="b/m")))
        try:
            await until(lambda: node.failures["declined"] > 0)
            assert node.model("m") is None
            assert scripted.requests == 1
        finally:
            client.cancel()


async def test_a_peer_that_names_a_model_and_does_not_have_it_costs_no_request(tmp_path: Path) -> None:
    """It says that its model has the form of ours and that it is idle, so it is asked first."""

    async def deny(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n")

    ours = ModelConfig(name="m", path="demo")
    forms = Forms()
    await forms.refresh([ours])
    scripted = Scripted(deny, models=[replace(MODEL, form=forms.known(ours), ready=READY)])
    async with beside(scripted, [ours]) as gateway:
        await until(lambda: gateway.app.services.fleet.forms.known(ours) != "")
        for _ in range(2):
            reply = await gateway.client.post("/v1/chat/completions", json=chat())
            assert reply.json()["choices"][0]["message"]["content"] == tokens(5)
            assert "x-mlxd-served-by" not in reply.headers
        # Loading costs time here, so it was asked; and then no more.
        assert scripted.requests == 1


async def drains_at_once(gateway: Gateway) -> bool:
    """Whether nothing is counted as running at peers any more."""
    async with asyncio.timeout(patient(20)):
        await gateway.app.services.fleet.drain(patient(60))
    return True


async def test_a_request_that_is_refused_before_it_is_sent_leaves_no_stream() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + PNG}}
    scripted = Scripted(nothing, models=[replace(MODEL, ready=READY)])
    async with beside(scripted) as gateway:
        body = chat(messages=[{"role": "user", "content": [image]}])
        assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 400
        assert scripted.requests == 0
        assert await drains_at_once(gateway)


async def test_a_question_that_is_too_large_leaves_no_stream() -> None:
    async with beside(Scripted(nothing)) as gateway:
        fleet = gateway.app.services.fleet
        model = fleet.find("m")
        assert model is not None
        with pytest.raises(Unsendable):
            await fleet.call(model, Tokenize(gateway.link.next_rid(), TextPrompt("x" * (MAX_FRAME_BYTES + 1))))
        assert await drains_at_once(gateway)


async def test_a_request_whose_deadline_passes_between_two_places_leaves_no_stream() -> None:
    async def lose(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with beside(Scripted(lose)) as gateway:
        body = chat(timeout=0.5, max_tokens=50)
        assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code >= 500
        assert await drains_at_once(gateway)


async def test_numbers_of_a_peers_worker_are_not_taken_for_those_of_ours() -> None:
    async with beside(Scripted(nothing)) as gateway:
        fleet, link = gateway.app.services.fleet, gateway.link
        model = fleet.find("m")
        assert model is not None
        stream = fleet.open(fleet.candidates(model, [], None)[0], "m", lambda _: None, "")
        connection = link.attach(stream.name, stream.epoch, lambda _: None, lambda _: None, stream)
        link.receive_from_peer(stream.epoch, Step(stream.epoch, 1, [], Stats(1, 1, 1, 1, 1, 1, 1, 1)))
        assert connection.stats is None
        stream.discard()
