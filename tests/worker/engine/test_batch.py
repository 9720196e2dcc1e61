"""The batch's own statistics."""

import gc
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import spec
from tests.support.models import build
from tests.support.prefix_checks import check_cache
from worker.engine.batch import Batch
from worker.engine.row import BatchSequence, Row
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model.loader import LoadedModel, load
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prompt.intake import Intake
from worker.speculation.policy import Speculator

MIB = 1 << 20


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


def row(loaded: LoadedModel, rid: int, prompt: int, output: int = 4) -> Row:
    ids = tuple(20 + (rid + at) % 400 for at in range(prompt))
    return Intake(loaded).row(Generate(rid, TokensPrompt(ids), Sampling(temperature=0.0), max_tokens=output), 0.0)


def test_a_long_prompt_stays_a_long_one_to_its_end(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    cache = PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 1 << 24)
    batch = Batch(loaded.model, loaded.eos_ids, cache)
    batch.insert(row(loaded, 1, 300))
    seen: list[int] = []
    while batch.prefilling:
        seen.append(batch.longest_prefill)
        batch.step(64)
    assert len(seen) > 4
    assert set(seen) == {300}

    batch.insert(row(loaded, 1, 340))
    assert batch.longest_prefill == 40, "what the cache holds does not count"
    batch.close()


def test_a_running_rows_prompt_is_stored_when_somebody_asks_for_it(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    cache = PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 1 << 24)
    batch = Batch(loaded.model, loaded.eos_ids, cache)
    first, stranger, relative = row(loaded, 1, 200), row(loaded, 2, 200), row(loaded, 1, 300)
    for other in (first, stranger):
        other.max_tokens = 50
        batch.insert(other)
        while batch.prefilling:
            batch.step(512)
    assert len(cache) == 0, "nobody has asked"
    batch.insert(relative)
    assert relative.stats.cached is not None
    assert relative.stats.cached >= 200
    assert stranger.stats.cached == 0
    check_cache(cache)
    batch.close()


def test_a_row_that_leaves_takes_all_that_was_kept_of_it_along(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    cache = PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 1 << 24)
    batch = Batch(loaded.model, (), cache, drafter=Speculator())
    rows = [row(loaded, rid, 40, output) for rid, output in ((1, 4), (2, 50), (3, 50))]
    for each in rows:
        batch.insert(each)
    while rows[0].sequence is not None:
        batch.step(16)
    batch.store_ended()
    batch.remove(rows[1])
    batch.abandon()
    gc.collect()
    assert not [
        sequence for sequence in gc.get_objects() if isinstance(sequence, BatchSequence) and sequence.row in rows[:2]
    ]
    assert [each.sequence for each in rows] == [None] * 3
    assert (len(batch), batch.prefilling, batch.decoding) == (0, 0, 0)
    batch.close()


def test_a_long_prompt_that_joins_takes_no_more_memory_than_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB of KV a token in eight layers, so that what the step itself needs is small beside it."""
    monkeypatch.setattr("worker.engine.batch.EARLY_STORE_TOKENS", 200)
    wide = {"num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128, "num_hidden_layers": 8}
    loaded = load(spec(build("qwen3", tmp_path / "wide", **wide)), nothing)
    cache = PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 1 << 30)
    batch = Batch(loaded.model, loaded.eos_ids, cache)
    batch.insert(row(loaded, 1, 20, output=1))
    while batch:
        batch.step(64)
    batch.store_ended()
    assert batch.kv_cost is not None
    weights = mx.get_active_memory() - cache.nbytes
    for rid in (2, 3):
        batch.insert(row(loaded, 50 * rid, 240, output=14))
        while batch.prefilling:
            mx.reset_peak_memory()
            batch.step(32)
        for _ in range(3):
            batch.step(32)
    mx.synchronize()
    assert cache.nbytes > batch.kv_cost.token_bytes * 2 * 200
    counted = weights + cache.nbytes + batch.kv_cost.bytes(2, 256) + batch.kv_cost.transient(2, 256)
    assert mx.get_peak_memory() < counted + 8 * MIB
    batch.close()


def test_prompts_of_unequal_progress_take_no_more_room_than_is_counted(model_folder: Callable[[str], Path]) -> None:
    loaded = load(spec(model_folder("qwen3")), nothing)
    batch = Batch(loaded.model, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 0))
    batch.insert(row(loaded, 1, 20, output=1))
    while batch:
        batch.step(64)
    batch.store_ended()
    assert batch.kv_cost is not None
    # The second one's chunk is much longer than what the first one has left.
    for rid in (2, 3):
        batch.insert(row(loaded, 50 * rid, 200))
        batch.step(150)
    assert batch.kv_bytes <= batch.kv_cost.bytes(2, 200 + batch.widest_step)
    batch.close()


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_a_message_of_one_token_beside_another_prompt_changes_no_token_of_a_sliding_window(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    loaded = load(spec(model_folder(architecture)), nothing)

    def said(rows: list[Row], chunk: int) -> list[int]:
        batch = Batch(loaded.model, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 0))
        for each in rows:
            batch.insert(each)
        ids: list[int] = []
        while batch:
            ids += [token.id for token in batch.step(chunk).tokens if token.row is rows[0]]
        batch.close()
        return ids

    alone = said([row(loaded, 1, 34, output=12)], 128)
    # The second prompt leaves the first one padded, and has gone when its message of one token comes.
    first, second = row(loaded, 1, 34, output=12), row(loaded, 7, 40, output=1)
    first.boundaries = [6, 8, 13, 20, 25, 26]
    assert said([first, second], 32) == alone
