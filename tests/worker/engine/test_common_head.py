"""Rows whose prompts begin alike: the later one reuses what the earlier one has computed, and never waits for the rest.

Steps are counted, each with the same number of tokens of every prompt.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from protocol.from_worker import Accepted, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB
from worker.engine.scheduling.pacing import ChunkPlan, Pacer
from worker.model.pass_costs import PassCosts

CHUNK = 32
HEAD = 100
LONG = 3000
STREAM, LATE = 1, 2
# Plain KV, a sliding window, a window with sinks, recurrent layers beside attention, and recurrent layers alone.
KINDS = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_5", "mamba")
rng = random.Random(3)


def ids(count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, VOCAB) for _ in range(count))


HEAD_IDS, STREAM_IDS, OTHER_IDS, TAIL = ids(HEAD), ids(30), ids(HEAD), ids(60)
TAILS = [ids(LONG) for _ in range(4)]


def request(rid: int, prompt: tuple[int, ...], tokens: int = 4, **fields: object) -> Generate:
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    return structs.replace(Generate(rid, TokensPrompt(prompt), sampling, tokens), **fields)


class EvenPacer(Pacer):
    """Gives each prompt the same number of tokens in every step, however long the step takes."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, PassCosts(), None, can_fuse=True, has_watchdog=False)

    def chunk(self, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        return ChunkPlan(CHUNK)

    def observe(self, timed: object) -> None:
        pass


@dataclass
class Watch:
    """Steps of the engine at which requests were accepted and got their first new token."""

    engine: EngineHarness
    accepted: dict[int, int] = field(default_factory=dict[int, int])
    first: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.engine.observe = self._observe

    def _observe(self, message: Up) -> None:
        at = self.engine.gauges.step_seq
        if isinstance(message, Accepted):
            self.accepted[message.rid] = at
        elif isinstance(message, Step):
            for delta in message.deltas:
                if delta.token_ids:
                    self.first.setdefault(delta.rid, at)

    def steps(self, rid: int = LATE) -> int:
        """Steps from the request's arrival to its first token."""
        self.engine.wait(lambda: rid in self.first, f"the first token of {rid}")
        return self.first[rid] - self.accepted[rid]


def steps_behind(folder: Path, earlier: Sequence[Generate], late: Generate, *, is_busy: bool = True) -> tuple[int, int]:
    """The steps of `late` behind the earlier requests, and how many of its tokens were reused."""
    with EngineHarness(spec(folder, prefill_chunk=CHUNK, max_running=32)) as engine:
        engine.engine.pacer = EvenPacer(engine.spec)
        watch = Watch(engine)
        if is_busy:
            engine.submit(request(STREAM, STREAM_IDS, 4000))
            watch.steps(STREAM)
        for each in earlier:
            engine.submit(each)
        engine.wait(lambda: all(each.rid in watch.accepted for each in earlier), "the earlier requests")
        result = engine.submit(late)
        steps = watch.steps()
        assert not any(engine.results[each.rid].terminals for each in earlier), "the earlier ones are long"
        engine.wait(lambda: result.terminals, "the end of the late one")
        engine.command(Abort((STREAM, *(each.rid for each in earlier))))
    assert result.usage is not None
    return steps, result.usage.cached


def assert_no_wait(folder: Path, earlier: Sequence[Generate], late: Callable[[tuple[int, ...]], Generate]) -> int:
    """Check that a request behind others with its head needs hardly more steps than one with another head. Returns how
    many of its tokens were reused.
    """
    for is_busy in (True, False):
        control, _ = steps_behind(folder, earlier, late(OTHER_IDS + TAIL), is_busy=is_busy)
        steps, cached = steps_behind(folder, earlier, late(HEAD_IDS + TAIL), is_busy=is_busy)
        assert steps <= 1.5 * control, (steps, control, is_busy)
    return cached


def longs(count: int = 1, **fields: object) -> list[Generate]:
    return [request(10 + at, HEAD_IDS + TAILS[at], **fields) for at in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_prompt_waits_for_the_common_head_alone(kind: str, model_folder: Callable[[str], Path]) -> None:
    cached = assert_no_wait(model_folder(kind), longs(), lambda prompt: request(LATE, prompt))

    assert cached == (HEAD if kind == "qwen3" else 0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_nobody_waits_for_scored_prompts(kind: str, model_folder: Callable[[str], Path]) -> None:
    scored = longs(4, prompt_logprobs=0, max_tokens=1)
    assert_no_wait(model_folder(kind), scored, lambda prompt: request(LATE, prompt))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "qwen3_5"])
def test_resumed_streams_go_on_beside_a_resumed_long_prompt(kind: str, model_folder: Callable[[str], Path]) -> None:
    resumed = longs(resume=TAIL[:5], max_tokens=50)
    assert_no_wait(model_folder(kind), resumed, lambda prompt: request(LATE, prompt, 50, resume=TAIL[:20]))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(("earlier", "late"), [(1, -1), (-1, 1), (0, 0)])
def test_priorities_change_nothing_about_it(
    kind: str, earlier: int, late: int, model_folder: Callable[[str], Path]
) -> None:
    others = longs(priority=earlier, tenant="batch")
    assert_no_wait(model_folder(kind), others, lambda p: request(LATE, p, priority=late, tenant="person"))


def test_many_rows_that_wait_for_a_head_close_the_queue_for_nobody(model_folder: Callable[[str], Path]) -> None:
    common = HEAD_IDS + TAILS[0][:-1000]
    longest = request(10, HEAD_IDS + TAILS[0])
    alike = [request(100 + at, (*common, *TAIL[:at])) for at in range(1, 60)]
    alike += [request(200 + at, (*common, *TAIL[1:at])) for at in range(2, 60)]
    stranger = request(LATE, OTHER_IDS + TAIL)
    alone, _ = steps_behind(model_folder("qwen3"), [longest], stranger)
    steps, _ = steps_behind(model_folder("qwen3"), [longest, *alike], stranger)

    assert steps <= 1.5 * alone
