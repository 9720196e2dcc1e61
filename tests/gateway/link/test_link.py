import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from gateway.link.collector import Collector
from gateway.link.link import RID_BITS, SEQ_BITS, WorkerLink
from gateway.link.sequence import PARKED, Sequence
from gateway.link.transport import Connection, SendFailed, SequenceProgressed, WorkerGone
from protocol import sockets
from protocol.codec import MAX_FRAME_BYTES, FrameTooLarge, decode_down, encode
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    Delta,
    Finish,
    Hello,
    Pong,
    Progress,
    PromptLogprob,
    PromptPart,
    Ready,
    Rejected,
    Step,
    TokenLogprob,
    Up,
)
from protocol.stats import Stats
from protocol.to_worker import Abort, Down, Drain, Generate, Ping, Sampling, Shutdown, TextPrompt, Tokenize
from tests.support.machine import Recorder
from tests.support.pool import short_home, until

pytestmark = pytest.mark.anyio
STATS = Stats(1, 2, 3, 4, 5, 6, 7, 8)
DIED = Failure(Code.WORKER_DIED, "died")


class Runner:
    """A worker as the link sees it."""

    def __init__(self, epoch: int = 3) -> None:
        self.name = "m"
        self.epoch = epoch
        self.is_ready = True
        self.posted: list[object] = []
        self.parked: list[Sequence] = []
        self.refused: Failure | None = None

    def refusal(self, request: Generate) -> Failure | None:
        return self.refused

    def attach(self, link: WorkerLink) -> Connection:
        return link.attach(self.name, self.epoch, self.posted.append, self.parked.append)


class Wire:
    """A link with one connected worker: `say` goes up, `hear` comes down."""

    def __init__(self, home: Path) -> None:
        self.events = Recorder()
        self.link = WorkerLink(home / "run", self.events, boot=5)
        self.runner = Runner()
        self.context = zmq.Context()

    async def __aenter__(self) -> "Wire":
        self.link.open()
        self.connection = self.runner.attach(self.link)
        self.down: Any = sockets.connect_dealer(self.context, self.link.down, b"m#3")
        self.up: Any = sockets.connect_push(self.context, self.link.up)
        self.down.send(b"")
        self.reader = asyncio.create_task(self.link.run())
        await until(self.is_connected)
        assert isinstance(self.hear(), Abort)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reader.cancel()
        await asyncio.wait([self.reader])
        self.link.close()
        for socket in (self.down, self.up):
            socket.close(0)
        self.context.term()

    def is_connected(self) -> bool:
        try:
            self.link.send(self.connection, Abort(()))
        except WorkerGone:
            return False
        return True

    def say(self, *messages: Up) -> None:
        for message in messages:
            self.up.send(encode(message))

    def hear(self) -> Down:
        assert self.down.poll(5000)
        return decode_down(self.down.recv())

    def detached(self) -> Sequence:
        """The only sequence of the worker, which is gone."""
        self.link.detach(self.runner.epoch)
        sequence = self.runner.parked.pop()
        assert (self.runner.parked, sequence.epoch) == ([], PARKED)
        return sequence

    def request(self) -> Generate:
        return Generate(self.link.next_rid(), TextPrompt("x"), Sampling())


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


async def test_what_a_worker_says_reaches_the_collector_of_its_request(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        assert wire.hear() == request
        rid = request.rid
        wire.say(
            Accepted(rid, 9), Progress(rid, 4, 9, 1, 20), Step(3, 1, [Delta(rid, text="a", token_ids=(1,))], STATS)
        )
        assert await collector.read_deltas(5.0) == [Delta(rid, text="a", token_ids=(1,))]
        assert (collector.accepted, collector.progress) == ({rid: 9}, Progress(rid, 4, 9, 1, 20))
        assert wire.connection.stats == STATS
        assert wire.events.steps == 1
        wire.say(Step(3, 2, [Delta(rid, finish=Finish.STOP)]))
        assert [d.finish for d in await collector.read_deltas(5.0)] == [Finish.STOP]
        assert collector.is_done
        assert wire.link.in_flight == 0


async def test_deltas_of_several_sequences_of_one_request_share_a_collector(home: Path) -> None:
    async with Wire(home) as wire:
        one, two = wire.request(), wire.request()
        collector = wire.link.submit(wire.runner, [one, two])
        assert collector.rids == (one.rid, two.rid)
        wire.say(Step(3, 1, [Delta(two.rid, text="b"), Delta(one.rid, text="a")]))
        assert {d.rid: d.text for d in await collector.read_deltas(5.0)} == {one.rid: "a", two.rid: "b"}


async def test_the_table_keeps_the_request_and_every_token_that_came(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        wire.say(Step(3, 1, [Delta(request.rid, token_ids=(1, 2))]), Step(3, 2, [Delta(request.rid, token_ids=(3,))]))
        got = 0
        while got < 3:
            got += sum(len(d.token_ids) for d in await collector.read_deltas(5.0))
        sequence = wire.detached()
        assert (sequence.generate, sequence.token_ids) == (request, [1, 2, 3])
        wire.link.fail([sequence, sequence], DIED)
        assert (await collector.read_deltas(5.0))[-1].failure == DIED
        assert wire.link.in_flight == 0


async def detached(wire: Wire, request: Generate, *deltas: Delta) -> tuple[Sequence, Collector]:
    """A sequence whose worker is gone after it sent `deltas`."""
    collector = wire.link.submit(wire.runner, [request])
    assert wire.hear() == request
    for delta in deltas:
        wire.say(Step(3, 1, [delta]))
        await collector.read_deltas(5.0)
    sequence = wire.detached()
    return sequence, collector


async def test_a_parked_sequence_goes_on_with_the_ids_its_client_has_and_the_same_collector(home: Path) -> None:
    async with Wire(home) as wire:
        request = replace(wire.request(), echo=True, deadline_ms=60_000)
        rid = request.rid
        sequence, collector = await detached(
            wire, request, Delta(rid, text="x"), Delta(rid, text="a", token_ids=(5, 6))
        )
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        again = wire.hear()
        assert isinstance(again, Generate)
        assert 50_000 < again.deadline_ms <= 60_000
        assert again == replace(request, resume=(5, 6), echo=False, deadline_ms=again.deadline_ms)
        wire.say(Accepted(rid, 9), Step(3, 9, [Delta(rid, text="b", token_ids=(7,), finish=Finish.STOP)]))
        assert [d.text for d in await collector.read_deltas(5.0)] == ["b"]
        assert collector.is_done
        assert (sequence.resumed_tokens, sequence.resumes, sequence.token_ids) == (2, 1, [5, 6, 7])


@pytest.mark.parametrize(
    ("truncate", "told", "again"), [(-1, (3, 900), (3, 900)), (-1, (0, 0), (0, 0)), (0, (0, 0), None)]
)
async def test_what_was_left_out_of_a_prompt_is_left_out_by_the_next_worker(
    truncate: int, told: tuple[int, int], again: tuple[int, int] | None, home: Path
) -> None:
    async with Wire(home) as wire:
        request = replace(wire.request(), truncate=truncate)
        collector = wire.link.submit(wire.runner, [request])
        assert wire.hear() == request
        wire.say(Accepted(request.rid, 9, truncated=told), Step(3, 1, [Delta(request.rid, token_ids=(5,))]))
        await collector.read_deltas(5.0)
        assert collector.truncated == told
        sequence = wire.detached()
        for _ in range(2):  # the second one may be lost before it has said anything
            wire.runner.attach(wire.link)
            wire.link.resume(3, sequence)
            assert wire.hear() == replace(request, resume=(5,), truncated=again)
            sequence = wire.detached()


async def test_an_echo_that_never_came_is_asked_for_again(home: Path) -> None:
    async with Wire(home) as wire:
        request = replace(wire.request(), echo=True)
        sequence, _ = await detached(wire, request)
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        assert wire.hear() == request


async def test_what_the_client_has_had_of_its_prompt_is_not_asked_for_again(home: Path) -> None:
    async with Wire(home) as wire:
        request = replace(wire.request(), echo=True, prompt_ids=True, prompt_logprobs=1)
        ids = Delta(request.rid, prompt=PromptPart((5, 6, 7)))
        entries = tuple(PromptLogprob(token, b"x", -1.0, 1) for token in (5, 6))
        scores = Delta(request.rid, prompt=PromptPart(logprobs=entries))
        sequence, _ = await detached(wire, request, ids, scores)
        for _ in range(2):
            wire.runner.attach(wire.link)
            wire.link.resume(3, sequence)
            # Neither the echo nor a token has come.
            assert wire.hear() == replace(request, prompt_ids=False, prompt_scored=2)
            sequence = wire.detached()


async def test_the_entries_of_an_echo_that_the_client_has_had_are_not_asked_for_again(home: Path) -> None:
    async with Wire(home) as wire:
        request = replace(wire.request(), echo=True, top_logprobs=0)
        entries = (TokenLogprob(b"x", -1.0), TokenLogprob(b"y", -2.0))
        parts = [Delta(request.rid, text="xy", logprobs=entries[:1]), Delta(request.rid, logprobs=entries[1:])]
        sequence, _ = await detached(wire, request, *parts)
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        assert wire.hear() == replace(request, echo_scored=2)


async def test_nothing_that_is_said_of_a_parked_sequence_counts(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        sequence, collector = await detached(wire, request)
        wire.runner.attach(wire.link)
        wire.say(
            Accepted(request.rid, 9),
            Rejected(request.rid, DIED),
            Step(3, 1, [Delta(request.rid, text="ghost"), Delta(request.rid, finish=Finish.STOP)]),
        )
        await until(lambda: wire.events.steps == 1)
        assert (collector.accepted, await collector.read_deltas(0.0)) == ({}, [])
        assert not sequence.is_over


async def test_a_parked_sequence_past_its_deadline_is_not_sent_and_ends(home: Path) -> None:
    async with Wire(home) as wire:
        sequence, collector = await detached(wire, replace(wire.request(), deadline_ms=1))
        await until(lambda: asyncio.get_running_loop().time() > (sequence.deadline or 0))
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        assert (await collector.read_deltas(5.0))[0].failure == Failure(
            Code.DEADLINE_EXCEEDED, "the request's deadline has passed"
        )
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


async def test_an_abort_of_a_parked_sequence_sends_nothing(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        sequence, _ = await detached(wire, request)
        wire.link.abort([request.rid], "client")
        assert sequence.is_over
        assert wire.link.in_flight == 0
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


@pytest.mark.parametrize("code", [Code.WORKER_DIED, Code.DRAINING])
async def test_a_worker_that_gives_up_a_sequence_unasked_does_not_end_it(home: Path, code: Code) -> None:
    async with Wire(home) as wire:
        one, two = wire.request(), wire.request()
        collector = wire.link.submit(wire.runner, [one, two])
        end = Delta(one.rid, token_ids=(1,), finish=Finish.ERROR, failure=Failure(code, "bye"))
        wire.say(Step(3, 1, [end]), Rejected(two.rid, Failure(code, "bye")), Step(3, 2, []))
        await until(lambda: wire.events.steps == 2)
        assert [sequence.rid for sequence in wire.runner.parked] == [one.rid, two.rid]
        assert [sequence.token_ids for sequence in wire.runner.parked] == [[], []]
        assert await collector.read_deltas(0.0) == []


async def test_a_worker_that_was_told_to_drain_ends_its_sequences(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        wire.link.send(wire.connection, Drain(5.0))
        failure = Failure(Code.DRAINING, "stopping")
        wire.say(Step(3, 1, [Delta(request.rid, finish=Finish.ERROR, failure=failure)]))
        assert (await collector.read_deltas(5.0))[0].failure == failure
        assert collector.is_done


@pytest.mark.parametrize("end", ["token", "finish", "rejected", "abort"])
async def test_a_trial_ends_with_a_token_or_an_end(home: Path, end: str) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        sequence, _ = await detached(wire, request)
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        sequence.is_watched = True
        wire.say(Step(3, 1, [Delta(request.rid, text="no token")]))
        await until(lambda: wire.events.steps == 1)
        assert wire.runner.posted == []
        match end:
            case "token":
                wire.say(
                    Step(3, 2, [Delta(request.rid, token_ids=(1,))]), Step(3, 3, [Delta(request.rid, token_ids=(2,))])
                )
            case "finish":
                wire.say(Step(3, 2, [Delta(request.rid, finish=Finish.STOP)]))
            case "rejected":
                wire.say(Rejected(request.rid, Failure(Code.INTERNAL, "no")))
            case _:
                wire.link.abort([request.rid], "client")
        await until(lambda: wire.runner.posted == [SequenceProgressed(3)])


async def test_a_refused_request_is_never_sent(home: Path) -> None:
    async with Wire(home) as wire:
        wire.runner.refused = Failure(Code.QUARANTINED, "no")
        collector = wire.link.submit(wire.runner, [wire.request(), wire.request()])
        assert [d.failure for d in await collector.read_deltas(5.0)] == [wire.runner.refused] * 2
        assert collector.is_done
        assert wire.link.in_flight == 0
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


async def test_stale_messages_are_dropped_and_counted(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        wire.say(
            Step(2, 1, [Delta(request.rid, text="ghost")]),
            Ready(2, "p", 1, 1, 1, 1, 0.0),
            Pong(2 << SEQ_BITS | 1, 0, STATS),
            Hello("m", 2, 1, 1, 0, "", "", "ready"),
            Hello("other", 3, 1, 1, 0, "", "", "ready"),
            Step(3, 1, [Delta(request.rid, text="real")]),
        )
        assert await collector.read_deltas(5.0) == [Delta(request.rid, text="real")]
        assert wire.events.stale == 5
        assert wire.runner.posted == []
        assert wire.connection.stats is None


async def test_a_worker_that_nobody_here_has_started_is_told_to_end_once_it_can_be_reached(home: Path) -> None:
    async with Wire(home) as wire:
        hello = Hello("other", 8, 1, 1, 0, "", "", "ready")
        wire.say(hello, Hello("m", 3, 1, 1, 0, "", "", "ready"))
        await until(lambda: wire.runner.posted != [])
        with sockets.connect_dealer(wire.context, wire.link.down, b"other#8") as other:
            other.send(b"")
            await until(lambda: other.poll(0) != 0)
            assert isinstance(decode_down(other.recv()), Shutdown)
        # One that is wanted hears nothing of the kind.
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


async def test_a_step_of_one_worker_cannot_touch_the_request_of_another(home: Path) -> None:
    async with Wire(home) as wire:
        other = Runner(epoch=4)
        other.attach(wire.link)
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        wire.say(Step(4, 1, [Delta(request.rid, text="ghost")]), Step(3, 1, [Delta(request.rid, text="real")]))
        assert await collector.read_deltas(5.0) == [Delta(request.rid, text="real")]


async def test_sequences_of_an_earlier_gateway_are_aborted(home: Path) -> None:
    async with Wire(home) as wire:
        stranger = 4 << RID_BITS | 1
        wire.say(Step(3, 1, [Delta(stranger, text="who?"), Delta(stranger + 1, finish=Finish.STOP)]))
        await until(lambda: wire.events.steps == 1)
        assert wire.hear() == Abort((stranger,), "gateway restarted")


async def test_a_rejection_is_the_terminal_delta(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        failure = Failure(Code.CONTEXT_LENGTH_EXCEEDED, "too long")
        wire.say(Rejected(request.rid, failure), Rejected(request.rid, failure))
        assert await collector.read_deltas(5.0) == [Delta(request.rid, finish=Finish.ERROR, failure=failure)]
        assert collector.is_done


async def test_abort_goes_down_once_and_what_follows_is_ignored(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        collector = wire.link.submit(wire.runner, [request])
        wire.link.abort([request.rid, 999], "client")
        wire.link.abort([request.rid], "client")
        wire.link.ping(wire.connection, 1)
        assert wire.link.unacked_aborts == 1
        wire.say(Step(3, 1, [Delta(request.rid, finish=Finish.ABORT)]))
        await until(lambda: wire.events.steps == 1)
        assert wire.link.unacked_aborts == 0
        assert wire.hear() == request
        assert wire.hear() == Abort((request.rid,), "client")
        assert isinstance(wire.hear(), Ping)
        assert not collector.is_done


async def test_aborts_of_a_worker_that_is_gone_are_not_waited_for(home: Path) -> None:
    async with Wire(home) as wire:
        request = wire.request()
        wire.link.submit(wire.runner, [request])
        wire.link.abort([request.rid], "client")
        wire.link.detach(wire.runner.epoch)
        assert wire.link.unacked_aborts == 0


async def test_submit_to_a_worker_that_is_gone_registers_nothing(home: Path) -> None:
    async with Wire(home) as wire:
        absent = Runner(epoch=44)
        connection = absent.attach(wire.link)
        with pytest.raises(WorkerGone):
            wire.link.submit(absent, [wire.request()])
        assert (connection.is_unreachable, absent.posted) == (True, [SendFailed(44)])
        absent.is_ready = False
        with pytest.raises(WorkerGone):
            wire.link.submit(absent, [wire.request()])
        assert wire.link.in_flight == 0


async def test_a_pong_finds_its_worker_by_the_epoch_in_its_number(home: Path) -> None:
    async with Wire(home) as wire:
        wire.link.ping(wire.connection, 123)
        ping = wire.hear()
        assert isinstance(ping, Ping)
        wire.say(Pong(ping.seq, ping.t_ns, STATS))
        await until(lambda: wire.events.pongs == 1)
        assert wire.connection.stats == STATS


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x00", b"\x92\x25\x01", encode(Step(3, 1, []))[:-1], b"\xdd" * 9])
async def test_a_malformed_frame_is_counted_and_the_next_message_is_read(home: Path, frame: bytes) -> None:
    async with Wire(home) as wire:
        wire.up.send(frame)
        wire.say(Step(3, 1, []))
        await until(lambda: wire.events.steps == 1)
        assert wire.events.malformed == 1


async def test_an_oversize_frame_costs_its_sender_the_connection_and_nobody_else(home: Path) -> None:
    async with Wire(home) as wire:
        rogue: Any = sockets.connect_push(wire.context, wire.link.up)
        rogue.send(bytes(MAX_FRAME_BYTES + 1))
        wire.say(Step(3, 1, []))
        await until(lambda: wire.events.steps == 1)
        assert wire.events.malformed == 0
        rogue.close(0)


async def test_a_request_larger_than_a_frame_is_refused_and_the_worker_stays_connected(home: Path) -> None:
    async with Wire(home) as wire:
        large = Generate(wire.link.next_rid(), TextPrompt("x" * MAX_FRAME_BYTES), Sampling())
        with pytest.raises(FrameTooLarge):
            wire.link.submit(wire.runner, [wire.request(), large])
        assert wire.link.in_flight == 0
        assert not wire.connection.is_unreachable
        request = wire.request()
        wire.link.submit(wire.runner, [request])
        assert wire.hear() == request


async def test_choices_that_together_exceed_a_frame_are_refused_before_one_is_sent(home: Path) -> None:
    async with Wire(home) as wire:
        text = "x" * (MAX_FRAME_BYTES // 15)
        choices = [Generate(wire.link.next_rid(), TextPrompt(text), Sampling()) for _ in range(16)]
        with pytest.raises(FrameTooLarge):
            wire.link.submit(wire.runner, choices)
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


async def test_a_worker_is_told_that_nobody_waits_for_an_answer_any_more(home: Path) -> None:
    async with Wire(home) as wire:
        rid = wire.link.next_rid()
        asking = asyncio.create_task(wire.link.call(3, Tokenize(rid, TextPrompt("x"))))
        await asyncio.sleep(0)
        assert isinstance(wire.hear(), Tokenize)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert wire.hear() == Abort((rid,))
        assert not wire.link.is_busy(wire.runner.epoch)


async def test_a_tokenize_call_larger_than_a_frame_is_refused_and_the_worker_stays_connected(home: Path) -> None:
    async with Wire(home) as wire:
        with pytest.raises(FrameTooLarge):
            await wire.link.call(3, Tokenize(wire.link.next_rid(), TextPrompt("x" * MAX_FRAME_BYTES)))
        assert not wire.link.is_busy(wire.runner.epoch)
        wire.link.ping(wire.connection, 1)
        assert isinstance(wire.hear(), Ping)


async def test_a_sequence_that_has_outgrown_a_frame_ends_when_its_worker_does(home: Path) -> None:
    async with Wire(home) as wire:
        request = Generate(wire.link.next_rid(), TextPrompt("x" * (MAX_FRAME_BYTES - 400)), Sampling())
        collector = wire.link.submit(wire.runner, [request])
        wire.hear()
        wire.say(Step(3, 1, [Delta(request.rid, text="y", token_ids=tuple(range(1000)))]))
        await collector.read_deltas(5.0)
        sequence = wire.detached()
        wire.runner.attach(wire.link)
        wire.link.resume(3, sequence)
        (end,) = await collector.read_deltas(5.0)
        assert end.failure is not None
        assert end.failure.code is Code.INVALID_REQUEST
        assert wire.link.in_flight == 0


async def test_request_ids_of_two_boots_never_meet(home: Path) -> None:
    one, two = (WorkerLink(home / "run", Recorder(), boot=boot) for boot in (1, 2))
    assert {one.next_rid() for _ in range(100)}.isdisjoint(two.next_rid() for _ in range(100))
