"""Rows behind a row for which there is no memory: which of them run before it, and that it is not starved.

Steps are counted, each with the same number of tokens of every prompt.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.to_worker import Abort, Generate
from tests.support.engine import EngineHarness, spec
from tests.worker.engine.test_common_head import CHUNK, LATE, OTHER_IDS, STREAM, TAIL, EvenPacer, Watch, ids, request

LARGE_IDS, SHORT_IDS = ids(1200), ids(40)
LARGE = 10


def kv_bytes(folder: Path, rows: int) -> int:
    """Memory for so many rows of the length of the large one."""
    with EngineHarness(spec(folder)) as engine:
        return engine.kv_cost.bytes(rows, len(LARGE_IDS) + 4)


def steps_behind(folder: Path, rows: int, late: Generate, large: Generate | None) -> int:
    """Steps of `late` in memory for so many large rows, beside as many streams, for whose end a large row waits."""
    streams = [request(STREAM + 100 * at, SHORT_IDS, 600, tenant="a") for at in range(rows)]
    with EngineHarness(spec(folder, prefill_chunk=CHUNK, kv_bytes=kv_bytes(folder, rows))) as engine:
        engine.engine.pacer = EvenPacer(engine.spec)
        watch = Watch(engine)
        for stream in streams:
            engine.submit(stream)
        for stream in streams:
            watch.steps(stream.rid)
        if large is not None:
            engine.submit(large)
            engine.wait(lambda: LARGE in watch.accepted, "the large row")
        engine.submit(late)
        steps = watch.steps()
        assert LARGE not in watch.first
        engine.command(Abort((*(stream.rid for stream in streams), LARGE, LATE)))
    return steps


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(("tenant", "rows"), [("b", 1), ("b", 2), ("a", 2)])
def test_a_row_runs_before_one_without_room_if_that_waits_no_longer(
    kind: str, tenant: str, rows: int, model_folder: Callable[[str], Path]
) -> None:
    """A row of the same tenant does so if the large one has room beside it, a row of another tenant in any case."""
    folder, late = model_folder(kind), request(LATE, OTHER_IDS + TAIL, tenant=tenant)
    large = request(LARGE, LARGE_IDS, tenant="a")
    assert steps_behind(folder, rows, late, large) <= 1.5 * steps_behind(folder, rows, late, None)


def test_rows_that_keep_coming_do_not_starve_one_without_room(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    stream, large = request(STREAM, SHORT_IDS, 60, tenant="a"), request(LARGE, LARGE_IDS, tenant="a")
    short = [request(100 + at, ids(40), 30, tenant="bc"[at % 2]) for at in range(24)]
    with EngineHarness(spec(folder, prefill_chunk=CHUNK, kv_bytes=kv_bytes(folder, 1))) as engine:
        engine.engine.pacer = EvenPacer(engine.spec)
        watch = Watch(engine)
        engine.submit(stream)
        watch.steps(STREAM)
        results = [engine.submit(each) for each in (large, *short)]
        engine.wait(lambda: all(result.terminals for result in results), "all ends")
    # Each of the other tenants has one row at a time while the stream runs, and none once it has ended.
    assert engine.ended.index(STREAM) < engine.ended.index(LARGE) < len(short) // 2


def test_a_less_urgent_row_does_not_run_before_one_without_room(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    rows = [request(LARGE, LARGE_IDS, tenant="a"), request(LATE, SHORT_IDS, tenant="b", priority=1)]
    with EngineHarness(spec(folder, prefill_chunk=CHUNK, kv_bytes=kv_bytes(folder, 1))) as engine:
        watch = Watch(engine)
        engine.submit(request(STREAM, SHORT_IDS, 60, tenant="a"))
        watch.steps(STREAM)
        results = [engine.submit(each) for each in rows]
        engine.wait(lambda: all(result.terminals for result in results), "all ends")
    assert engine.ended == [STREAM, LARGE, LATE]
