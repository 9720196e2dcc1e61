"""A model's attention by a kernel of ours: which layers and passes it answers, and that tokens stay what they are."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import build
from tests.support.scale import scaled
from tests.support.tiled_attention import tiled
from worker.attention.kernel import LayerKV, bound_sums
from worker.engine.load_checks import choose
from worker.model.loader import load

IDS = [20 + 7 * at for at in range(15)]


class Counted:
    """The kernels' tiling, which notes the tokens of a row in each call and the rows' lengths."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, queries: mx.array, kv: LayerKV, lengths: mx.array, *others: Any) -> mx.array:
        self.calls.append((queries.shape[2], tuple(lengths.tolist()[: len(queries)])))  # pyright: ignore[reportArgumentType, reportIndexIssue]
        return tiled(queries, kv, lengths, *others)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model whose heads have 64 numbers, built once."""
    folders: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in folders:
            path = tmp_path_factory.mktemp("wide") / architecture
            folders[architecture] = build(architecture, path, head_dim=64)
        return folders[architecture]

    return folder


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


def requests() -> list[Generate]:
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    prompts = [tuple(IDS[:4]), tuple(IDS * 3), tuple(reversed(IDS))]
    return [Generate(rid, TokensPrompt(prompt), greedy, max_tokens=12) for rid, prompt in enumerate(prompts, 1)]


@pytest.mark.parametrize(
    ("architecture", "bits"), [("qwen3", 0), ("qwen3", 8), *scaled([("llama", 0)], []), ("gpt_oss", 0)]
)
def test_tokens_by_the_kernel_are_those_of_mlx(architecture: str, bits: int, wide: Callable[[str], Path]) -> None:
    counted = Counted()
    with EngineHarness(spec(wide(architecture), kv_bits=bits)) as engine:
        expected = [result.ids for result in engine.run(requests())]
    with EngineHarness(spec(wide(architecture), kv_bits=bits), check=partial(choose, attend=counted)) as engine:
        counted.calls.clear()
        assert engine.loaded.plan.attention == "kernel"
        assert [result.ids for result in engine.run(requests())] == expected
    unequal = [tokens for tokens, lengths in counted.calls if len(set(lengths)) > 1]
    assert 1 in unequal, "steps of rows of unequal lengths"
    assert max(tokens for tokens, _ in counted.calls) <= 16


def test_without_a_gpu_attention_is_mlx_s(wide: Callable[[str], Path]) -> None:
    plan = choose(load(spec(wide("qwen3")), nothing).model, IDS, "auto")
    assert plan.attention == "mlx"


def short(queries: mx.array, kv: LayerKV, lengths: mx.array, *others: Any) -> mx.array:
    return tiled(queries, kv, mx.maximum(lengths - 1, 0), *others)


def deaf(queries: mx.array, kv: LayerKV, lengths: mx.array, end: int, *others: Any) -> mx.array:
    return tiled(queries, kv, lengths, min(end, 4096), *others)


def crowded(queries: mx.array, kv: LayerKV, lengths: mx.array, *others: Any) -> mx.array:
    return tiled(queries, kv, lengths, *others) * (1 + (len(queries) >= 8))


@pytest.mark.parametrize("attend", [short, deaf, crowded])
def test_a_kernel_that_is_wrong_is_not_used(attend: Any, wide: Callable[[str], Path]) -> None:
    """As one that leaves out the last slot of a row or all beyond the eighth split, or is wrong with eight rows."""
    loaded = load(spec(wide("qwen3")), nothing)
    plan = choose(loaded.model, IDS, "auto", attend=attend)
    assert plan.attention.startswith("mlx, because its kernel is off by ")
    assert plan.reason == "", "all else is as before"


def test_a_kernel_that_sums_by_the_rows_beside_a_row_is_not_used(wide: Callable[[str], Path]) -> None:
    def uneven(queries: mx.array, kv: LayerKV, lengths: mx.array, *others: Any) -> mx.array:
        return tiled(queries, kv, lengths, *others) * (1 + 1e-5 * (len(queries) - 1))

    plan = choose(load(spec(wide("qwen3")), nothing).model, IDS, "auto", attend=uneven)
    assert plan.attention == "mlx, because its kernel gives a row other numbers beside other rows"


def test_a_kernel_that_does_not_compile_is_not_used(wide: Callable[[str], Path]) -> None:
    def broken(*_: Any) -> mx.array:
        raise RuntimeError("Failed to compile kernel: k.cu(1): error.\nand more")

    plan = choose(load(spec(wide("qwen3")), nothing).model, IDS, "auto", attend=broken)
    assert plan.attention == "mlx, because RuntimeError: Failed to compile kernel: k.cu(1): error."


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mamba", "mlx, because its attention has another form in mlx-lm"),
        ("qwen3", "mlx, because there is no kernel for its heads or caches"),
    ],
)
def test_a_model_without_such_attention_says_so(architecture: str, reason: str, tmp_path: Path) -> None:
    folder = build(architecture, tmp_path / "model")
    assert choose(load(spec(folder), nothing).model, IDS, "auto", attend=tiled).attention == reason


def test_a_lane_that_is_configured_has_no_kernels(wide: Callable[[str], Path]) -> None:
    plan = choose(load(spec(wide("qwen3")), nothing).model, IDS, "together", attend=tiled)
    assert plan.attention == "mlx, because batching = 'together'"


def test_mlx_lm_and_its_modules_stay_as_they_are(wide: Callable[[str], Path]) -> None:
    from mlx_lm.models import qwen3
    from mlx_lm.models.base import scaled_dot_product_attention

    own = qwen3.Attention.__call__
    assert choose(load(spec(wide("qwen3")), nothing).model, IDS, "auto", attend=tiled).attention == "kernel"
    assert qwen3.Attention.__call__ is own
    assert own.__globals__["scaled_dot_product_attention"] is scaled_dot_product_attention


def test_a_pass_whose_sums_would_take_too_much_memory_has_mlx_s_attention(
    wide: Callable[[str], Path],
) -> None:
    counted = Counted()
    with EngineHarness(spec(wide("qwen3")), check=partial(choose, attend=counted)) as engine:
        counted.calls.clear()
        bound_sums(engine.loaded.model, 0)
        assert all(result.ids for result in engine.run(requests()))
    assert not counted.calls
