"""Whatever happens to a worker in whatever order: nobody waits for ever, and no process is lost."""

import asyncio
from collections.abc import Coroutine

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.link.sequence import PARKED
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.failures import Code, Failure
from protocol.from_worker import Drained, Goodbye
from tests.support.machine import Machine, settle
from tests.support.scale import patient

# Weighted towards what moves the machine on: a story of refusals tells little.
ORDERS = ("up", "up", "ask", "ask", "run", "run", "speak", "leave", "stop", "stop", "drain", "load", "restart")
CHANGES = ("respec", "rename")
MEMORY = ("evict", "evict", "close gate", "open gate", "recycle", "deny")
WORDS = ("hello", "ready", "drained", "stuck", "alien", "old", "give up", "give up")
WORLD = ("toggle room", "toggle room", "toggle reach", "toggle spawn", "suspect")
EXITS = (-9, -9, -6, 0, 1, 64, 69, 70)
WAITS = (0.1, 1.0, 2.5, 16.0, 301.0, 700.0)
ACTIONS = st.sampled_from([*ORDERS, *CHANGES, *MEMORY, *WORDS, *WORLD, *EXITS, *WAITS])


class Story:
    """Plays actions, and remembers everybody who waits and every process."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.waiting: list[asyncio.Task[None]] = []

    async def play(self, action: str | int | float) -> None:
        match action:
            case int():
                self.exit_newest(action)
            case float():
                await self.m.world.pass_time(action)
            case "speak":
                for sequence in [f for f in self.m.world.sequences if f.epoch == self.m.worker.epoch]:
                    await self.m.speak(sequence)
            case "up":
                self.wait(self.m.worker.ensure_ready())
                await settle()
                self.m.hello()
                self.m.ready()
            case _:
                self.act(action)
        await settle()

    def act(self, action: str) -> None:
        m, worker = self.m, self.m.worker
        match action:
            case "ask":
                self.wait(worker.ensure_ready())
            case "load":
                self.wait(worker.load())
            case "restart":
                self.wait(worker.restart())
            case "respec":
                worker.change(replace(worker.spec, context=worker.spec.context + 1), is_preload=False, is_reload=True)
            case "rename":
                worker.change(worker.spec, is_preload=worker.is_preload, is_reload=False)
            case "evict":
                worker.evict()
            case "close gate":
                worker.close_gate()
            case "open gate":
                worker.open_gate()
            case "recycle":
                worker.recycle()
            case "deny":
                m.world.denial = None if m.world.denial else Failure(Code.DOES_NOT_FIT, "too large")
            case "stop":
                self.wait(worker.stop(0.0))
            case "drain":
                self.wait(worker.stop(5.0))
            case "hello":
                m.hello()
            case "alien":
                m.hello(protocol=9)
            case "ready":
                m.ready()
            case "run":
                if worker.is_ready:
                    m.run(f"prompt {len(m.world.sequences) % 3}")
            case "leave":
                for sequence in [f for f in m.world.sequences if not f.is_over][:1]:
                    m.leave(sequence)
            case "give up":
                for sequence in [f for f in m.world.sequences if f.epoch == worker.epoch and not f.is_over][:1]:
                    m.give_up(sequence)
            case "old":
                m.ready(epoch=worker.epoch - 1)
            case "drained":
                m.post(Drained(worker.epoch, 0))
            case "stuck":
                m.pong(running=1, step_age_ms=10**9)
            case "suspect":
                m.lose_touch()
            case "toggle room":
                (m.world.room.clear if m.world.room.is_set() else m.world.room.set)()
            case "toggle spawn":
                m.world.spawn_error = None if m.world.spawn_error else OSError("no")
            case _:
                m.world.is_unreachable = not m.world.is_unreachable

    def exit_newest(self, status: int) -> None:
        alive = [process for process in self.m.world.processes if not process.has_exited]
        if alive:
            if status == 64:
                self.m.post(Goodbye(self.m.worker.epoch, "load", Failure(Code.BAD_CONFIG, "bad")))
            alive[-1].exit(status)

    def wait(self, call: Coroutine[None, None, None]) -> None:
        self.waiting.append(asyncio.create_task(call))

    def check(self) -> None:
        worker, world = self.m.worker, self.m.world
        alive = [process for process in world.processes if not process.has_exited]
        assert len(alive) <= 1, "two processes at a time"
        if worker.state in (State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE):
            assert not alive, f"a process in state {worker.state}"
        for sequence in world.sequences:
            assert sequence.is_over or sequence.epoch in (PARKED, worker.epoch), "a sequence of a worker that is gone"
        world.parked = []
        worker.parked.expire()
        parked = sorted(sequence.rid for sequence in world.parked if not sequence.is_over)
        homeless = sorted(f.rid for f in world.sequences if f.epoch == PARKED and not f.is_over)
        assert parked == homeless, "a sequence without a worker is parked, once, and no other is"
        if worker.state is State.STOPPED:
            assert all(sequence.is_over for sequence in world.sequences), "nobody will go on with it"
        if worker.state in (State.READY, State.DRAINING, State.STOPPING):
            assert worker.pid


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.booleans())
def test_no_story_leaves_a_waiter_or_a_process_behind(actions: list[str | int | float], is_preload: bool) -> None:
    async def run() -> None:
        async with Machine(is_preload=is_preload) as m:
            story = Story(m)
            for action in actions:
                await story.play(action)
                # An exit is handled a moment later: last words may follow.
                await m.world.pass_time(0.05)
                story.check()
            closing = asyncio.create_task(m.worker.stop(0.0, is_closing=True))
            for _ in range(3):
                await settle()
                story.exit_newest(0)
                await m.world.pass_time(0.1)
            await asyncio.wait_for(closing, patient(5))
            results = await asyncio.wait_for(asyncio.gather(*story.waiting, return_exceptions=True), patient(5))
            assert all(result is None or isinstance(result, ModelUnavailable) for result in results)
            assert m.worker.state is State.STOPPED
            # What still runs at the end was running when its worker was told to stop: that one sends its end.
            assert all(sequence.is_over for sequence in m.world.sequences)
            assert all(process.has_exited and process.is_closed for process in m.world.processes)

    asyncio.run(run())
