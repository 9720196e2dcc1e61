"""Series under vLLM's names, for dashboards and scrapers made for vLLM."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from gateway.telemetry.metrics import ModelMetrics
from protocol.spec import ADAPTERS_MAX
from protocol.stats import BLOCK

OURS: Final = "mlxd_"
# Maps our series to vLLM's names for series with the same meaning and unit.
NAMES: Final = {
    name: name
    for name in (
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
        "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
        "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    )
} | {"iteration_tokens": "iteration_tokens_total"}  # fmt: skip


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield each family, and its copy under vLLM's name if there is one."""
    for family in families:
        yield family
        theirs = NAMES.get(family.name.removeprefix(OURS))
        if theirs is not None:
            yield _renamed(family, f"vllm:{theirs}")


def lora_requests(models: Mapping[str, ModelMetrics]) -> Metric:
    """Return the adapters of running requests with the labels that routers for vLLM read. The value is the time."""
    family = Metric("vllm:lora_requests_info", "Adapters of running requests.", "gauge")
    for model, numbers in models.items():
        if numbers.adapters:
            running = ",".join(sorted(name for name, count in numbers.adapters_running.items() if count > 0))
            labels = {"model_name": model, "engine": "0", "max_lora": str(ADAPTERS_MAX)}
            labels |= {"running_lora_adapters": running, "waiting_lora_adapters": ""}
            family.samples.append(Sample(family.name, labels, time.time()))
    return family


def cache_config(models: Mapping[str, ModelMetrics]) -> Metric:
    """Return the KV capacity of loaded models in blocks, which are the unit of KV events. The value is 1.

    A model whose KV does not grow with the context has no blocks and no sample.
    """
    family = Metric("vllm:cache_config_info", "KV that a model has room for, in blocks of tokens.", "gauge")
    for model, numbers in models.items():
        stats = numbers.stats
        if stats is not None and stats.kv_blocks:
            labels = {"model_name": model, "engine": "0", "block_size": str(BLOCK)}
            labels |= {"num_gpu_blocks": str(stats.kv_blocks), "enable_prefix_caching": "True"}
            labels |= {"cache_dtype": f"int{stats.kv_bits}" if stats.kv_bits else "auto"}
            family.samples.append(Sample(family.name, labels, 1.0))
    return family


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        labels = {"model_name" if key == "model" else key: value for key, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(name + suffix, labels | {"engine": "0"}, sample.value))
    return renamed
