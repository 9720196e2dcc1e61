"""Rows of batches: they run while there is no other request, and end with the tokens that they would have had."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from protocol.from_worker import Accepted, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import BATCH_PRIORITY, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec


def request(rid: int, output: int, priority: int = 0) -> Generate:
    return Generate(
        rid,
        TokensPrompt(tuple(20 + (rid * 31 + at * 7) % 400 for at in range(40))),
        Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
        max_tokens=output,
        priority=priority,
    )


def of_a_batch(count: int, output: int) -> list[Generate]:
    return [request(rid, output, BATCH_PRIORITY) for rid in range(1, count + 1)]


class RecordedEngine(EngineHarness):
    """Keeps all messages in their order."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.sent: list[Up] = []

    def _receive(self, message: Up) -> None:
        self.sent.append(message)
        super()._receive(message)

    def tokens_beside(self, rid: int) -> int:
        """Tokens of other rows from the acceptance of a row to its end."""
        began = next(at for at, each in enumerate(self.sent) if isinstance(each, Accepted) and each.rid == rid)
        count = 0
        for delta in (delta for each in self.sent[began:] if isinstance(each, Step) for delta in each.deltas):
            if delta.rid != rid:
                count += len(delta.token_ids)
            elif delta.finish is not None:
                return count
        raise AssertionError("the row has not ended")


@pytest.mark.parametrize("cache_bytes", [0, 1 << 28])
def test_a_request_amid_a_batch_runs_alone_and_the_batch_then_ends_as_if_undisturbed(
    cache_bytes: int, model_folder: Callable[[str], Path]
) -> None:
    batch, person = of_a_batch(3, 200), request(9, 30)
    with EngineHarness(spec(model_folder("qwen3"), cache_bytes=cache_bytes, max_running=3)) as engine:
        alone = [engine.run([msgspec.structs.replace(each, priority=0)])[0].ids for each in [*batch, person]]
    with RecordedEngine(spec(model_folder("qwen3"), cache_bytes=cache_bytes, max_running=3)) as engine:
        results = [engine.submit(each) for each in batch]
        engine.wait(lambda: all(len(result.ids) > 5 for result in results), "a batch that fills all slots")
        answer = engine.submit(person)
        engine.wait(lambda: all(result.terminals for result in results), "the batch")
        assert engine.gauges.preemptions == 3
    assert engine.ended[0] == person.rid
    assert engine.tokens_beside(person.rid) <= len(batch), "those of the step in flight"
    assert [result.ids for result in [*results, answer]] == alone


def test_a_full_queue_of_a_batch_refuses_no_other_request(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), max_running=1, max_waiting=1)) as engine:
        results = [engine.submit(each) for each in of_a_batch(2, 60)]
        engine.wait(lambda: results[0].ids, "a batch that fills the slot and the queue")
        answers = [engine.submit(request(rid, 5)) for rid in (11, 12)]
        engine.wait(lambda: all(each.terminals for each in [*results, *answers]), "all ends")
    assert [each.failure for each in [*answers, *results]] == [None] * 4
    assert engine.ended[:2] == [11, 12]


def test_requests_of_any_priority_come_before_a_batch(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), max_running=1)) as engine:
        batch = engine.submit(request(1, 60, BATCH_PRIORITY))
        engine.wait(lambda: batch.ids, "a first token")
        last = engine.submit(request(2, 5, (1 << 31) - 1))
        engine.wait(lambda: batch.terminals and last.terminals, "both ends")
    assert engine.ended == [2, 1]
