"""The disk cache in the engine: exact on every architecture, over restarts, beside other rows."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Finish, Generate, Sampling, TokensPrompt, WorkerSpec
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import ARCHITECTURES, VOCAB

GREEDY = Sampling(temperature=0.0)
SHARED = 150
CAP = 1 << 28


def disk_spec(model: Path, folder: Path, **settings: Any) -> WorkerSpec:
    return spec(model, **{"disk_cache_dir": str(folder), "disk_cache_bytes": CAP, **settings})


def words(seed: object, count: int) -> tuple[int, ...]:
    rng = random.Random(str(seed))
    return tuple(rng.randrange(10, VOCAB) for _ in range(count))


def family(count: int) -> list[Generate]:
    """Requests with a common beginning; every other one is sampled."""
    return [
        Generate(
            rid,
            TokensPrompt(words("shared", SHARED) + words(rid, 70 + 7 * rid)),
            Sampling(temperature=0.9, top_p=0.95, seed=rid) if rid % 2 else GREEDY,
            max_tokens=16,
        )
        for rid in range(1, count + 1)
    ]


def said(results: Sequence[Result]) -> list[tuple[list[int], str, Finish | None]]:
    return [(result.ids, result.text, result.finish) for result in results]


def cached(result: Result) -> int:
    assert result.usage is not None
    return result.usage.cached


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_the_same_from_disk_after_a_restart(
    architecture: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    batch = family(4)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        cold = said([engine.run([request])[0] for request in batch])
    with EngineHarness(disk_spec(model_folder(architecture), tmp_path)) as engine:
        assert said([engine.run([request])[0] for request in batch]) == cold
        assert engine.gauges.cache.disk_hits == 0
    with EngineHarness(disk_spec(model_folder(architecture), tmp_path)) as engine:
        restored = [engine.run([request])[0] for request in batch]
        counts, disk = engine.gauges.cache, engine.gauges.disk
    assert said(restored) == cold
    sizes = [len(request.prompt.ids) for request in batch if isinstance(request.prompt, TokensPrompt)]
    assert [cached(result) for result in restored] == [size - 1 for size in sizes]
    assert counts.disk_hits >= 1
    assert counts.disk_restored_tokens >= sizes[0] - 1
    assert disk.quarantined == disk.dropped == 0
