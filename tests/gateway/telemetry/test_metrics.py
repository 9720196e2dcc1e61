from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.metrics import Histogram, Metrics
from gateway.telemetry.prometheus import NAMES, Exposition
from gateway.workers.supervisor.state import Events, State
from protocol.from_worker import Delta, Pong, Step, Usage
from protocol.stats import DraftStats, Stats
from tests.gateway.harness import chat, running

STATS = Stats(
    *(2, 3, 1, 500, 10, 20, 30, 40, 50),
    drafted=(DraftStats("lookup", 4, 9, 7, (4, 3)),),
    draft_width=4,
    draft_gain=1.5,
    kv_blocks=512,
)


def values(metrics: Metrics, *, has_vllm_names: bool = False) -> dict[str, float]:
    return parsed(Exposition(metrics, has_vllm_names=has_vllm_names).text().decode())


def parsed(text: str) -> dict[str, float]:
    """Every sample, by its name and labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_metrics_implement_what_the_pool_reports() -> None:
    metrics: Events = Metrics()
    metrics.stale_message()


def test_an_observation_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 99):
        histogram.observe(value)
    histogram.observe(2, times=3)

    assert histogram.cumulative() == [("1.0", 2), ("2.0", 7), ("+Inf", 8)]
    assert histogram.count == 8
    assert histogram.sum == 110


def test_every_series_has_help_and_counters_end_with_total() -> None:
    metrics = Metrics()
    metrics.declare(["m"])
    families = list(text_string_to_metric_families(Exposition(metrics).text().decode()))

    names = {family.name for family in families}
    for wanted in (
        "num_requests_running", "num_requests_waiting", "worker_state", "worker_step_age_seconds", "prompt_tokens",
        "generation_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds", "ignored_fields",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "e2e_request_latency_seconds",
        "admission_rejections", "worker_restarts", "stale_messages", "malformed_frames", "worker_memory_bytes",
    ):  # fmt: skip
        assert f"mlxd_{wanted}" in names
    for family in families:
        assert family.documentation
        for sample in family.samples:
            if family.name.startswith("mlxd_") and family.type == "counter":
                assert sample.name.endswith("_total")
            if family.type == "histogram":
                assert not family.name.endswith(("_total", "_count", "_sum"))


def test_what_a_worker_reports_is_shown() -> None:
    metrics = Metrics()
    metrics.state("m", State.READY)
    metrics.step("m", Step(1, 1, [Delta(1, token_ids=(1, 2)), Delta(2, token_ids=(3,))], STATS))
    metrics.worker_exit("m", -9)
    metrics.worker_exit("m", 0)
    metrics.load_seconds("m", 3)
    metrics.worker_stuck("m")
    metrics.stale_message()
    metrics.malformed_frame()

    found = values(metrics)
    assert found["mlxd_generation_tokens_total{model=m}"] == 3
    assert found["mlxd_iteration_tokens_sum{model=m}"] == 3
    assert found["mlxd_num_requests_running{model=m}"] == 2
    assert found["mlxd_num_requests_waiting{model=m}"] == 3
    assert found["mlxd_worker_step_age_seconds{model=m}"] == 0.5
    assert found["mlxd_worker_memory_bytes{kind=phys_footprint,model=m}"] == 40
    assert found["mlxd_worker_state{model=m,state=ready}"] == 1
    assert found["mlxd_worker_state{model=m,state=failed}"] == 0
    assert found["mlxd_worker_restarts_total{exit=-9,model=m}"] == 1
    assert "mlxd_worker_restarts_total{exit=0,model=m}" not in found
    assert found["mlxd_model_load_seconds_count{model=m}"] == 1
    assert found["mlxd_worker_stuck_total{model=m}"] == 1
    assert found["mlxd_stale_messages_total{}"] == found["mlxd_malformed_frames_total{}"] == 1


def test_a_worker_that_is_gone_runs_nothing() -> None:
    metrics = Metrics()
    metrics.pong("m", Pong(1, 1, STATS))
    metrics.state("m", State.BACKOFF)

    assert values(metrics)["mlxd_num_requests_running{model=m}"] == 0


def test_drafts_are_told_by_source_and_place() -> None:
    metrics = Metrics()
    metrics.pong("m", Pong(1, 1, STATS))
    found = values(metrics)

    assert found["mlxd_spec_decode_num_drafts_total{model=m,source=lookup}"] == 4
    assert found["mlxd_spec_decode_num_draft_tokens_total{model=m,source=lookup}"] == 9
    assert found["mlxd_spec_decode_num_accepted_tokens_total{model=m,source=lookup}"] == 7
    assert found["mlxd_spec_decode_num_accepted_tokens_per_pos_total{model=m,position=1,source=lookup}"] == 3
    assert (found["mlxd_spec_width{model=m}"], found["mlxd_spec_gain_ratio{model=m}"]) == (4, 1.5)


def test_a_finished_sequence_is_recorded() -> None:
    metrics = Metrics()
    metrics.model("m").sequence_ended("stop", Usage(10, 4, 5, queue_ms=1000, prefill_ms=2000, decode_ms=4000))

    found = values(metrics)
    assert found["mlxd_request_success_total{finished_reason=stop,model=m}"] == 1
    assert found["mlxd_prompt_tokens_total{model=m}"] == 10
    assert found["mlxd_prompt_tokens_cached_total{model=m}"] == 4
    assert found["mlxd_request_queue_time_seconds_sum{model=m}"] == 1
    assert found["mlxd_request_decode_time_seconds_sum{model=m}"] == 4
    assert found["mlxd_request_time_per_output_token_seconds_sum{model=m}"] == 1


def test_a_request_is_counted_by_the_conventions_of_opentelemetry() -> None:
    metrics = Metrics()
    metrics.gen_ai.observe("chat", "m", 2.0, first_token_s=0.5, per_token_s=0.03)
    metrics.gen_ai.observe("chat", "m", 1.0, error="deadline_exceeded", first_token_s=0.5)
    found = values(metrics)

    labels = "gen_ai_operation_name=chat,gen_ai_provider_name=mlxd,gen_ai_request_model=m,gen_ai_response_model=m"
    assert found[f"gen_ai_server_request_duration_seconds_sum{{error_type=,{labels}}}"] == 2
    assert found[f"gen_ai_server_request_duration_seconds_sum{{error_type=deadline_exceeded,{labels}}}"] == 1
    assert found[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 1
    assert found[f"gen_ai_server_time_per_output_token_seconds_sum{{{labels}}}"] == 0.03


def test_the_series_that_vllm_has_are_shown_under_its_names_where_that_is_wanted() -> None:
    metrics = Metrics()
    metrics.model("m").sequence_ended("stop", Usage(10, 4, 5, queue_ms=1000, prefill_ms=2000, decode_ms=4000))
    metrics.step("m", Step(1, 1, [Delta(1, token_ids=(1, 2))], STATS))
    assert "vllm:" not in Exposition(metrics).text().decode()
    found = values(metrics, has_vllm_names=True)

    assert found["vllm:num_requests_running{engine=0,model_name=m}"] == 2
    assert found["vllm:prompt_tokens_total{engine=0,model_name=m}"] == 10
    assert found["vllm:request_success_total{engine=0,finished_reason=stop,model_name=m}"] == 1
    assert found["vllm:request_queue_time_seconds_sum{engine=0,model_name=m}"] == 1
    assert found["vllm:e2e_request_latency_seconds_bucket{engine=0,le=+Inf,model_name=m}"] == 0
    assert found["vllm:iteration_tokens_total_sum{engine=0,model_name=m}"] == 2
    (config,) = [name for name in found if name.startswith("vllm:cache_config_info{")]
    assert "block_size=64" in config
    assert "num_gpu_blocks=512" in config
    metrics.step("m", Step(1, 2, [], structs.replace(STATS, kv_blocks=0)))
    text = Exposition(metrics, has_vllm_names=True).text().decode()
    assert "vllm:cache_config_info{" not in text, "its KV does not grow"
    metrics.model("m").adapters.update({"sql": 3, "docs": 1})
    metrics.model("m").adapters_running.update({"sql": 2, "docs": 0})
    text = Exposition(metrics, has_vllm_names=True).text().decode()
    line = next(line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert 'running_lora_adapters="sql"' in line
    assert 'max_lora="64"' in line
    assert found["mlxd_num_requests_running{model=m}"] == 2
    for name in NAMES.values():
        assert any(key.startswith(f"vllm:{name}") for key in found), name


@pytest.mark.anyio
async def test_a_scrape_asks_for_the_names_of_vllm(tmp_path: Path, anyio_backend: str) -> None:
    async with running(tmp_path) as gateway:
        get = gateway.client.get
        assert "vllm:num_requests_running{" in (await get("/metrics?names=vllm")).text
        assert "vllm:" not in (await get("/metrics")).text
        refused = await get("/metrics?names=sglang")

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "names")


@pytest.mark.anyio
async def test_a_request_is_counted_under_its_resolved_model_and_nothing_else(
    tmp_path: Path, anyio_backend: str
) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=chat(stream=True, max_tokens=5, zap=1))
        await gateway.client.post("/v1/chat/completions", json=chat(model="no-such-model"))
        await gateway.client.post("/v1/chat/completions", json=chat(temperature=9))
        answer = await gateway.client.get("/metrics")

        assert answer.headers["content-type"].startswith("text/plain")
        assert "no-such-model" not in answer.text
        found = values(gateway.metrics)
        assert found["mlxd_requests_total{model=m,status=200}"] == 1
        assert found["mlxd_requests_total{model=unknown,status=404}"] == 1
        assert found["mlxd_requests_total{model=unknown,status=400}"] == 1
        assert found["mlxd_time_to_first_token_seconds_count{model=m}"] == 1
        # Tokens that arrive together with the first one have no gap to measure.
        assert 0 <= found["mlxd_inter_token_latency_seconds_count{model=m}"] <= 4
        assert found["mlxd_e2e_request_latency_seconds_count{model=m}"] == 1
        assert found["mlxd_generation_tokens_total{model=m}"] == 5
        assert found["mlxd_ignored_fields_total{model=m}"] == 1


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
