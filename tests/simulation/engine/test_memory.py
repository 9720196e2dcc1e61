"""Memory of a batch, seen between the ticks of an engine."""
# pyright: reportPrivateUsage=false

from protocol.to_worker import Generate, Sampling, SetMemory, Shutdown, TokensPrompt
from tests.simulation.engine.machine import Clock, intake_of, machine, model_of
from tests.simulation.engine.world import Worker
from tests.support.engine import spec
from worker.engine.inbox import Command


def test_a_smaller_limit_frees_the_places_of_rows_that_it_took_out() -> None:
    clock, output = Clock(), 40
    requests = [
        Generate(rid, TokensPrompt(tuple(range(10 + rid, 210 + rid))), Sampling(ignore_eos=True), max_tokens=output)
        for rid in (1, 2, 3)
    ]
    held: list[tuple[int, int]] = []

    def turn() -> list[Command]:
        engine = worker.engine
        rows = engine._batch.rows
        held.append((len(rows), engine._batch.kv_bytes))
        if len(held) == 1:
            return [intake_of("qwen3").row(request, clock.now) for request in requests]
        if len(rows) == 3 and engine._batch.decoding == 3 and limit not in limits:
            limits.append(limit)
            return [SetMemory(1 << 30, limit / before, 0.0)]
        return [] if engine._requests else [Shutdown()]

    limits: list[int] = []
    with machine(clock, 1):
        worker = Worker("qwen3", spec(model_of("qwen3").path, kv_bytes=1 << 30, speculate="off"), turn, lambda _: None)
        before, limit = 1 << 30, int(2.5 * worker.engine.kv_cost.bytes(1, 256))
        worker.engine.run()
    smaller = [kv_bytes for rows, kv_bytes in held if rows == 2]
    assert max(kv_bytes for rows, kv_bytes in held if rows == 3) > limit
    # One free place of three is not half of the batch, so only the limit frees it.
    assert 0 < max(smaller) <= limit
