"""Estimates of a model's memory before it is loaded."""

import json
from pathlib import Path

from gateway.config.settings import CacheConfig, ModelConfig
from gateway.model_files.known_times import BUFFER_BYTES, ENCODE_BYTES, FEATURES_BYTES, OVERHEAD_BYTES
from gateway.model_files.metadata import find, inspect
from gateway.workers.memory.estimate import (
    COMFORT_TOKENS,
    KV_PART,
    LEAST_TOKENS,
    PASS_BYTES,
    PASS_LOAN_MAX,
    UNKNOWN_KV_BYTES,
    Need,
    estimate,
)
from protocol.from_worker import MAX_CLIP_BYTES, MIN_CLIP_BYTES
from protocol.timing_profile import LoadFacts

LENDABLE = 1 << 40
FIXED = OVERHEAD_BYTES + BUFFER_BYTES


def need(**fields: object) -> Need:
    return estimate(ModelConfig(name="m", **({"path": "demo"} | fields)), LENDABLE)  # type: ignore[arg-type]


def test_what_info_says_to_fit_is_what_a_load_is_granted_without_kv() -> None:
    own = need()
    fits = [inspect(find("demo"), "auto", 0, available).fits for available in (FIXED + own.weights - 1, own.least)]
    assert fits == [False, True]


def test_a_model_needs_its_weights_a_process_and_kv_for_its_context() -> None:
    info = inspect(find("demo"), "auto", 0, 0)
    assert info.kv_1k_bytes is not None
    own = need()
    per_token = info.kv_1k_bytes // 1000
    assert own.weights == info.weights_bytes
    assert own.floor == FIXED + own.weights + int(per_token * COMFORT_TOKENS / KV_PART)
    assert own.least == FIXED + own.weights + int(per_token * LEAST_TOKENS / KV_PART)
    assert own.most == own.floor + LENDABLE


def test_a_short_context_needs_less() -> None:
    assert need(context=2048).floor < need().floor
    assert need(context=512).floor == need(context=512).least < need().least


def test_quantized_kv_needs_less() -> None:
    info = inspect(find("demo"), "auto", 0, 0, 8)
    assert info.kv_1k_bytes is not None
    own = need(kv_bits=8)
    assert own.floor < need().floor
    assert own.least == FIXED + own.weights + int(info.kv_1k_bytes // 1000 * LEAST_TOKENS / KV_PART)


def test_explicit_kv_and_cache_are_counted_and_nothing_more_is_lent() -> None:
    own = need(kv_bytes=7 << 20, cache=CacheConfig(5 << 20))
    assert own.floor == own.least == own.most == FIXED + own.weights + (12 << 20)
    assert need(kv_bytes=7 << 20).most > LENDABLE


def test_an_explicit_share_is_the_whole_need_but_never_less_than_the_weights() -> None:
    assert need(memory_bytes=1 << 30) == Need(need().weights, 1 << 30, 1 << 30, 1 << 30)
    assert need(memory_bytes=1).floor == need().weights


def test_a_model_that_cannot_be_read_is_left_to_its_worker_to_explain() -> None:
    own = need(path="/nowhere")
    assert own.weights == 0
    assert own.least == own.floor < 1 << 29


def test_an_architecture_without_known_kv_gets_at_least_a_little_for_it(tmp_path: Path) -> None:
    demo = find("demo")
    config = json.loads((demo / "config.json").read_bytes()) | {"kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in demo.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    own = need(path=str(tmp_path))
    assert own.least == own.floor == FIXED + own.weights + UNKNOWN_KV_BYTES


def test_a_model_with_towers_needs_room_for_features_and_an_encode() -> None:
    info = inspect(find("demo-vision"), "auto", 0, 0)
    own = need(path="demo-vision", kv_bytes=7 << 20, cache=CacheConfig(0))

    assert 0 < info.tower_bytes < info.weights_bytes == own.weights
    assert own.floor == FIXED + own.weights + FEATURES_BYTES + ENCODE_BYTES + (7 << 20)


def test_a_draft_model_is_counted_with_the_one_that_it_drafts_for() -> None:
    own, both = need(), need(draft="demo")
    assert both.weights == 2 * own.weights
    assert both.floor - own.floor > own.weights, "its KV as well"
    assert need(draft="/nowhere") == own


def test_a_model_that_reads_has_no_kv_and_needs_what_a_pass_computes() -> None:
    own = need(kind="embed")
    assert own.least == own.floor == FIXED + own.weights + PASS_BYTES
    assert own.most == own.floor + PASS_LOAN_MAX
    assert own.floor < need().floor
    assert need(kind="rerank") == own
    assert need(kind="embed", kv_bytes=1 << 40) == own, "there is no KV to be set aside"


def test_a_model_that_hears_needs_room_for_clips_and_one_that_speaks_none() -> None:
    hears, speaks, reads = need(kind="audio"), need(kind="audio", path="org/Soprano-80M"), need(kind="embed")
    assert hears.floor == reads.floor + MAX_CLIP_BYTES
    assert hears.least == reads.least + MIN_CLIP_BYTES
    assert speaks.least == speaks.floor == speaks.weights + FIXED + PASS_BYTES


def test_what_a_load_has_shown_counts_for_the_next_one() -> None:
    usual = need()
    seen = LoadFacts(1.0, 0.1, usual.weights, usual.weights + FIXED + (1 << 30), 1, 0)
    own = estimate(ModelConfig(name="m", path="demo"), LENDABLE, seen)
    assert own.floor == usual.floor + (1 << 30), "a process that is larger than others"
    small = LoadFacts(1.0, 0.1, usual.weights, usual.weights, 1, 0)
    assert estimate(ModelConfig(name="m", path="demo"), LENDABLE, small) == usual


def test_kv_that_is_not_computed_here_is_known_once_a_worker_has_measured_it(tmp_path: Path) -> None:
    demo = find("demo")
    config = json.loads((demo / "config.json").read_bytes()) | {"kv_lora_rank": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in demo.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    load = LoadFacts(1.0, 0.1, need().weights, 0, token_bytes=1 << 16, row_bytes=1 << 20)
    own = estimate(ModelConfig(name="m", path=str(tmp_path), context=2048), LENDABLE, load)
    assert own.floor == FIXED + own.weights + int(((1 << 16) * 2048 + (1 << 20)) / KV_PART)
