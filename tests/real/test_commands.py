"""Verbs of `mlxctl` on models with real weights: what they prove, measure and show."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.real.figures import Figures
from tests.real.prepare import GEMMA3, MINILM, SMOLLM2, WHISPER_BASE
from tests.real.reference import reference
from tests.real.serving import Served
from tests.support.ctl import COMMAND, ctl, environment
from tests.support.scale import patient

pytestmark = pytest.mark.soak
MODELS = {
    "text": f'path = "{SMOLLM2}"\ncontext = 2048',
    "four": f'path = "{SMOLLM2}"\nkv_bits = 4',
    "gemma": f'path = "{GEMMA3}"',
    "embed": f'path = "{MINILM}"',
    "hear": f'path = "{WHISPER_BASE}"',
}
CALIBRATED_S = 12
# A second copy of the model is loaded, and run a hundred times.
DEADLINE_S = 400


def started(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(home), timeout=patient(DEADLINE_S), check=False
    )


def info(served: Served, model: str) -> tuple[dict[str, Any], str]:
    """The JSON of `mlxctl info`, and what it prints for people."""
    return json.loads(ctl(served.home, "info", model, "--json").stdout), ctl(served.home, "info", model).stdout


def test_verify_proves_the_disk_cache(served: Served, figures: Figures) -> None:
    done = started(served.home, "verify", "text", "--tokens", "4", "--json")
    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}

    disk = checks["cache on disk"]
    proved = [name for name, check in checks.items() if not check.get("is_skipped")]
    figures.note("`mlxctl verify`", f"{len(proved)} checks equal, {disk['cached']} tokens from disk")
    for name in ("perplexity", "first token"):
        figures.note(f"`mlxctl verify`, {name}", checks[name]["measured"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert disk["cached"] > 0


def test_calibrate_names_the_tokens_that_it_has_processed(served: Served, figures: Figures) -> None:
    done = started(served.home, "calibrate", "text", "--seconds", str(CALIBRATED_S), "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    prompts = {each["size"]: each["tokens_per_s"] for each in found if each["kind"] == "prefill"}

    assert done.returncode == 0, done.stderr
    for tokens, rate in prompts.items():
        bare = tokens / bare_prefill_s(SMOLLM2, tokens)
        figures.note(f"{tokens} tokens: `mlxctl calibrate`, bare mlx-lm", f"{rate:.0f}, {bare:.0f} tok/s")
    assert list(prompts) == sorted(prompts)
    # How far the time reaches is not asserted: a slow machine processes a part of the first prompt.
    assert 0 < max(prompts) <= 2040


def bare_prefill_s(folder: Path, tokens: int) -> float:
    """Seconds of mlx-lm's own loop over a prompt, in chunks of the usual size."""
    model, cache = reference(folder).model, make_prompt_cache(reference(folder).model)
    begin = time.monotonic()
    for at in range(0, tokens, 512):
        model(mx.arange(at, min(at + 512, tokens))[None] % 49_000, cache=cache)
        mx.eval([layer.state for layer in cache])
    return time.monotonic() - begin


def test_info_of_an_encoder_has_its_longest_input_and_no_kv(served: Served) -> None:
    facts, shown = info(served, "embed")

    assert (facts["kind"], facts["context"], facts.get("kv_1k_bytes")) == ("embed", 256, None)
    assert "KV" not in shown
    assert "context    256 tokens" in shown


def test_info_of_whisper_says_transcripts_and_no_kv(served: Served) -> None:
    _, shown = info(served, "hear")

    assert "makes      transcripts\n" in shown
    assert "KV" not in shown
    assert "?" not in shown


def test_info_of_gemma_has_the_kv_of_its_layers(served: Served) -> None:
    facts, shown = info(served, "gemma")

    # Of 18 layers three have full attention; a token takes two vectors of 256 numbers of four bytes in each.
    assert facts["kv_1k_bytes"] == 1000 * 3 * 2 * 256 * 4
    assert facts["kv_window_bytes"] == 512 * 15 * 2 * 256 * 4
    assert "for sliding windows" in shown


def test_info_warns_of_four_bits_where_heads_are_small(served: Served) -> None:
    assert "4 bits cost a model with heads of 64 numbers" in info(served, "four")[1]
    assert "perplexity" not in info(served, "text")[1]


def test_bench_of_an_embedding_model_runs_with_its_defaults(served: Served, figures: Figures) -> None:
    done = started(served.home, "bench", "embed", "--requests", "1", "--json")
    reports = json.loads(done.stdout)["reports"]

    assert done.returncode == 0, done.stderr
    rates = ", ".join(f"{report['requests_per_s']:.1f} with {report['concurrency']}" for report in reports)
    figures.note("`mlxctl bench`, MiniLM: texts a second by clients", rates)
    assert [report["errors"] for report in reports] == [0, 0, 0]


def test_ps_says_how_fast_a_model_is_measured_to_be(served: Served) -> None:
    served.post("/v1/completions", {"model": "text", "prompt": "Hello", "max_tokens": 2})
    shown = info(served, "text")[1]

    assert "measured  :" not in shown
    assert any(line.startswith("speed ") and "here: " in line for line in shown.splitlines())
