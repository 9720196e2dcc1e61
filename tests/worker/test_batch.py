"""What the batch says of itself."""

from collections.abc import Callable
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache

from protocol.messages import Generate, Sampling, TokensPrompt
from tests.support.engine import spec
from worker.batch import Batch
from worker.intake import Intake
from worker.kv import Layout
from worker.loader import Loaded, load
from worker.prefix_cache import PrefixCache
from worker.rows import Row


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


def row(loaded: Loaded, rid: int, prompt: int) -> Row:
    ids = tuple(20 + (rid + at) % 400 for at in range(prompt))
    return Intake(loaded).row(Generate(rid, TokensPrompt(ids), Sampling(temperature=0.0), max_tokens=4), 0.0)


def test_a_long_prompt_stays_a_long_one_to_its_end(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    cache = PrefixCache(Layout.of(lambda: make_prompt_cache(loaded.model)), 1 << 24)
    batch = Batch(loaded.model, loaded.eos_ids, 4, 512, cache)
    batch.insert(row(loaded, 1, 300))
    seen: list[int] = []
    while batch.prefilling:
        seen.append(batch.longest_prefill)
        batch.tick(64)
    assert len(seen) > 4
    assert set(seen) == {300}

    batch.insert(row(loaded, 1, 340))
    assert batch.longest_prefill == 40, "what the cache holds does not count"
    batch.close()


def test_a_running_rows_prompt_is_stored_when_somebody_asks_for_it(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    cache = PrefixCache(Layout.of(lambda: make_prompt_cache(loaded.model)), 1 << 24)
    batch = Batch(loaded.model, loaded.eos_ids, 4, 512, cache)
    first, stranger, relative = row(loaded, 1, 200), row(loaded, 2, 200), row(loaded, 1, 300)
    for other in (first, stranger):
        other.max_tokens = 50
        batch.insert(other)
        while batch.prefilling:
            batch.tick(512)
    assert len(cache) == 0, "nobody has asked"
    batch.insert(relative)
    assert relative.cached is not None
    assert relative.cached >= 200
    assert stranger.cached == 0
    cache.check()
    batch.close()
