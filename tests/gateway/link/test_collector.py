import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.link.collector import Collector
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, DeltaKind, Finish, PromptLogprob, PromptPart, TokenLogprob, ToolCallDelta, Usage
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
DIED = Failure(Code.WORKER_DIED, "the worker died")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def drain(collector: Collector) -> list[Delta]:
    deltas: list[Delta] = []
    while not collector.is_done:
        deltas += await collector.read_deltas(1.0)
    return deltas


def fail(collector: Collector) -> None:
    for rid in collector.rids:
        collector.send_delta(Delta(rid, finish=Finish.ERROR, failure=DIED))


async def test_a_waiting_reader_gets_a_delta_as_it_was_put() -> None:
    collector = Collector([7])
    delta = Delta(7, text="hi", token_ids=(1,))
    asyncio.get_running_loop().call_soon(collector.send_delta, delta)
    assert await collector.read_deltas() == [delta]
    assert not collector.is_done


async def test_unread_deltas_of_one_kind_become_one_with_everything_in_it() -> None:
    collector = Collector([7])
    one, two = TokenLogprob(b"a", -0.1), TokenLogprob(b"b", -0.2)
    usage = Usage(prompt=3, cached=0, completion=2)
    collector.send_delta(Delta(7, text="a", token_ids=(1,), logprobs=(one,)))
    collector.send_delta(Delta(7, token_ids=(2,), logprobs=(two,)))
    collector.send_delta(Delta(7, text="b", finish=Finish.STOP, usage=usage, ending_ids=(3,)))
    assert await collector.read_deltas() == [
        Delta(
            7,
            text="ab",
            token_ids=(1, 2),
            logprobs=(one, two),
            finish=Finish.STOP,
            usage=usage,
            ending_ids=(3,),
        )
    ]
    assert collector.is_done


async def test_parts_of_a_prompt_stay_apart_from_output_and_from_each_other() -> None:
    collector = Collector([7])
    entries = tuple(PromptLogprob(token, b"x", -1.0, 1) for token in (5, 6))
    parts = [Delta(7, prompt=PromptPart((5, 6))), *(Delta(7, prompt=PromptPart(logprobs=(each,))) for each in entries)]
    for delta in (*parts, Delta(7, text="a"), Delta(7, text="b")):
        collector.send_delta(delta)
    assert await collector.read_deltas() == [*parts, Delta(7, text="ab")]


async def test_kinds_and_tool_calls_are_never_merged_across_their_borders() -> None:
    collector = Collector([7])
    deltas = [
        Delta(7, kind=DeltaKind.REASONING, text="hm"),
        Delta(7, text="so"),
        Delta(7, kind=DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "a", "f")),
        Delta(7, kind=DeltaKind.TOOL_ARGS, text="{}", tool=ToolCallDelta(0)),
        Delta(7, kind=DeltaKind.TOOL_ARGS, text="[]", tool=ToolCallDelta(1)),
        Delta(7, kind=DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
        Delta(7, kind=DeltaKind.TOOL_END, tool=ToolCallDelta(1)),
    ]
    for delta in deltas:
        collector.send_delta(delta)
    assert await collector.read_deltas() == deltas


async def test_next_gives_up_at_its_timeout_and_then_still_works() -> None:
    collector = Collector([7])
    assert await collector.read_deltas(0.01) == []
    collector.send_delta(Delta(7, text="late"))
    assert await collector.read_deltas(0.01) == [Delta(7, text="late")]
    assert await collector.read_deltas(0.01) == []
    collector.stop_timer()


async def test_a_shorter_timeout_after_a_longer_one_is_kept() -> None:
    collector = Collector([7])
    loop = asyncio.get_running_loop()
    loop.call_soon(collector.send_delta, Delta(7, text="a"))
    await collector.read_deltas(60.0)
    async with asyncio.timeout(patient(5)):
        assert await collector.read_deltas(0.01) == []
    collector.stop_timer()


async def test_a_wait_without_timeout_outlives_an_earlier_timer() -> None:
    collector = Collector([7])
    loop = asyncio.get_running_loop()
    loop.call_soon(collector.send_delta, Delta(7, text="a"))
    await collector.read_deltas(0.02)
    loop.call_later(0.05, collector.send_delta, Delta(7, text="b"))
    assert await collector.read_deltas() == [Delta(7, text="b")]


async def test_failure_ends_only_the_unfinished_rids_and_a_second_one_adds_nothing() -> None:
    collector = Collector([1, 2])
    collector.send_delta(Delta(1, text="done", finish=Finish.STOP))
    collector.send_delta(Delta(2, text="half"))
    fail(collector)
    fail(collector)
    collector.send_delta(Delta(2, text="ghost"))
    assert await drain(collector) == [
        Delta(1, text="done", finish=Finish.STOP),
        Delta(2, text="half", finish=Finish.ERROR, failure=DIED),
    ]


async def test_a_cancelled_reader_loses_nothing() -> None:
    collector = Collector([7])
    reader = asyncio.create_task(collector.read_deltas())
    await asyncio.sleep(0)
    collector.send_delta(Delta(7, text="kept"))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await collector.read_deltas() == [Delta(7, text="kept")]


async def test_next_after_the_end_returns_at_once() -> None:
    collector = Collector([7])
    fail(collector)
    await collector.read_deltas()
    assert await collector.read_deltas() == []


class UnreadReader:
    """A reader's `on_unread` that keeps what it reads."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.is_open = True
        self.taken: list[Delta] = []

    def __call__(self) -> bool:
        if self.is_open:
            self.taken += self.collector.read_deltas_nowait()
        return self.is_open


async def test_on_unread_reads_all_but_the_end_while_its_reader_waits() -> None:
    collector = Collector([7])
    on_unread = UnreadReader(collector)
    reader = asyncio.create_task(collector.read_deltas(on_unread=on_unread))
    await asyncio.sleep(0)
    for text in "abc":
        collector.send_delta(Delta(7, text=text))
    assert [delta.text for delta in on_unread.taken] == ["a", "b", "c"]
    collector.send_delta(Delta(7, text="d", finish=Finish.STOP))
    assert await reader == [Delta(7, text="d", finish=Finish.STOP)]
    assert collector.is_done


async def test_on_unread_gets_what_was_added_between_two_deliveries_as_one() -> None:
    collector = Collector([7])
    on_unread = UnreadReader(collector)
    reader = asyncio.create_task(collector.read_deltas(on_unread=on_unread))
    await asyncio.sleep(0)
    collector.append_delta(Delta(7, text="a", token_ids=(1,)), 0.0)
    collector.append_delta(Delta(7, text="b", token_ids=(2,)), 0.0)
    collector.wake_reader()
    collector.wake_reader()
    assert on_unread.taken == [Delta(7, text="ab", token_ids=(1, 2))]
    reader.cancel()


async def test_what_on_unread_does_not_read_is_its_readers() -> None:
    collector = Collector([7])
    on_unread = UnreadReader(collector)
    on_unread.is_open = False
    reader = asyncio.create_task(collector.read_deltas(on_unread=on_unread))
    await asyncio.sleep(0)
    collector.send_delta(Delta(7, text="a"))
    on_unread.is_open = True
    # The reader has been woken: what comes before its turn must not overtake what it gets.
    collector.send_delta(Delta(7, text="b"))
    assert on_unread.taken == []
    assert await reader == [Delta(7, text="ab")]


async def test_what_on_unread_raises_is_raised_in_its_reader() -> None:
    collector = Collector([7])

    def on_unread() -> bool:
        raise ValueError("an encoder's")

    reader = asyncio.create_task(collector.read_deltas(on_unread=on_unread))
    await asyncio.sleep(0)
    collector.send_delta(Delta(7, text="a"))
    with pytest.raises(ValueError, match="an encoder's"):
        await reader


async def test_a_readers_timeout_restarts_with_what_on_unread_reads() -> None:
    collector = Collector([7])
    loop = asyncio.get_running_loop()
    started = loop.time()
    for index in range(1, 6):
        loop.call_later(0.02 * index, collector.send_delta, Delta(7, text="a"))
    on_unread = UnreadReader(collector)
    assert await collector.read_deltas(0.06, on_unread) == []
    assert len(on_unread.taken) == 5
    assert loop.time() - started >= 0.16
    collector.stop_timer()


KINDS = st.sampled_from([DeltaKind.TEXT, DeltaKind.REASONING])
PIECE = st.tuples(st.sampled_from([1, 2, 3]), KINDS, st.text(max_size=3), st.integers(0, 9))
SCRIPT = st.lists(st.one_of(PIECE, st.just("read"), st.just("finish"), st.just("fail")), max_size=60)


def spell(deltas: list[Delta], rid: int) -> list[tuple[DeltaKind, str]]:
    return [(d.kind, char) for d in deltas if d.rid == rid for char in d.text]


@given(SCRIPT)
def test_no_interleaving_of_puts_and_reads_loses_or_reorders_anything(script: list[object]) -> None:
    async def run() -> None:
        collector = Collector([1, 2, 3])
        put: list[Delta] = []
        read: list[Delta] = []
        over: set[int] = set()
        for action in script:
            match action:
                case "read":
                    read += await collector.read_deltas(0) if collector.is_done or put else []
                case "finish":
                    rid = 1 + len(put) % 3
                    collector.send_delta(Delta(rid, finish=Finish.STOP))
                    over.add(rid)
                case "fail":
                    fail(collector)
                    over |= {1, 2, 3}
                case (int(rid), DeltaKind() as kind, str(text), int(token)):
                    delta = Delta(rid, kind=kind, text=text, token_ids=(token,))
                    collector.send_delta(delta)
                    if rid not in over:
                        put.append(delta)
        fail(collector)
        read += await drain(collector)
        collector.stop_timer()
        for rid in (1, 2, 3):
            assert spell(read, rid) == spell(put, rid)
            ids = [t for d in read if d.rid == rid for t in d.token_ids]
            assert ids == [t for d in put if d.rid == rid for t in d.token_ids]
            ends = [d for d in read if d.rid == rid and d.finish is not None]
            assert len(ends) == 1
            assert [d for d in read if d.rid == rid][-1] is ends[0]

    asyncio.run(run())
