"""Quantized KV at load: a model that cannot have it is refused with the reason, and kernels are not trusted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from protocol.failures import Code, ExitStatus
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import build
from worker.engine import load_checks
from worker.engine.load_checks import choose_form
from worker.errors import LoadFailed
from worker.kv.quantized import KvForm, kv_form_of
from worker.model.loader import load, read_config
from worker.start.checked_model import load_checked

IDS = [20 + 7 * at for at in range(15)]


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model whose heads have 64 numbers, built once."""
    folders: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in folders:
            path = tmp_path_factory.mktemp("wide") / architecture
            folders[architecture] = build(architecture, path, head_dim=64)
        return folders[architecture]

    return folder


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_reads_codes_where_they_give_what_their_numbers_give(
    bits: int, wide_folder: Callable[[str], Path]
) -> None:
    loaded = load_checked(spec(wide_folder("qwen3"), kv_bits=bits), nothing)
    assert kv_form_of(loaded.model) == KvForm(bits, 64)
    assert loaded.plan.reuses_prefixes
    assert loaded.plan.reason == ""


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("qwen3", {}, "heads have 16 numbers, which neither 64 nor 32 divides"),
        ("qwen3", {"head_dim": 32, "kv_lora_rank": 8}, "latent vector"),
        ("mamba", {}, "none of its layers keeps the KV of all tokens"),
    ],
)
def test_a_model_that_cannot_have_it_is_refused_with_the_reason(
    architecture: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = build(architecture, tmp_path / "model", **changes)
    with pytest.raises(LoadFailed, match="cannot have its KV quantized: .*" + reason) as caught:
        load_checked(spec(folder, kv_bits=8), nothing)
    assert caught.value.failure.code is Code.BAD_CONFIG
    assert caught.value.exit_status is ExitStatus.BAD_CONFIG


def test_attention_that_cannot_read_codes_is_given_numbers(
    wide_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "mlxd.worker")
    loaded = load_checked(spec(wide_folder("gpt_oss"), kv_bits=8), nothing)
    assert kv_form_of(loaded.model) == KvForm(8, 64, reads_codes=False)
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "does not support attention sinks" in line] == told


def test_a_kernel_that_is_wrong_over_codes_is_not_used(
    wide_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernel gives zeros from 1,024 tokens on."""
    right = load_checks.scaled_dot_product_attention

    def wrong(queries: mx.array, keys: Any, values: Any, cache: Any, **others: Any) -> mx.array:
        output = right(queries, keys, values, cache, **others)
        return mx.zeros_like(output) if hasattr(cache, "bits") else output

    monkeypatch.setattr(load_checks, "scaled_dot_product_attention", wrong)
    caplog.set_level("WARNING", "mlxd.worker")
    path = wide_folder("qwen3")
    form = choose_form(load(spec(path), nothing).model, read_config(path), 8, IDS)
    assert form == KvForm(8, 64, reads_codes=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "KV in 8 bits is dequantized for each step: over codes, attention is off by 1"


def test_each_answer_names_the_bits_and_kv_takes_as_many(wide_folder: Callable[[str], Path]) -> None:
    path = wide_folder("qwen3")
    request = Generate(1, TokensPrompt((20, 21, 22)), Sampling(temperature=0.0, ignore_eos=True), max_tokens=8)
    bytes_of: dict[int, int] = {}
    for bits in (0, 8, 4):
        with EngineHarness(spec(path, kv_bits=bits)) as engine:
            assert len(engine.run([request])[0].ids) == 8
            bytes_of[bits] = engine.kv_cost.token_bytes
            assert engine.intake.row(request, 0.0).deviations == ((f"kv-bits-{bits}",) if bits else ())
            # What attention is given is not smaller for it.
            assert engine.kv_cost.widest == bytes_of[0] // 4, "one of four layers"
    # Scales and biases are float32 here: one bit more for each number.
    assert bytes_of[8] / bytes_of[0] == (8 + 1) / 32
    assert bytes_of[4] / bytes_of[0] == (4 + 1) / 32
