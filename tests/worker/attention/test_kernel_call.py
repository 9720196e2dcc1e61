"""Calls of the attention kernels: the text of a kernel depends neither on the number of rows nor on the sinks' type."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from worker.attention import kernel, metal_text
from worker.attention.kernel import LayerKV, attend
from worker.attention.kernel_text import (
    COMMON,
    SPLIT_BODY,
    SPLIT_INPUTS,
    SPLIT_OUTPUTS,
    SUM_BODY,
    SUM_INPUTS,
    SUM_OUTPUTS,
    source,
)
from worker.kv.ragged import Lengths

HEADS, KV_HEADS, DIM = 4, 2, 64
ROWS: Final = (1, 2, 7, 8, 9)


def call(rows: int, lengths: mx.array, dtype: mx.Dtype = mx.float32, sinks: mx.array | None = None) -> mx.array:
    queries = mx.zeros((rows, HEADS, 1, DIM), dtype)
    kv = mx.zeros((rows, KV_HEADS, 512, DIM), dtype)
    return attend(queries, LayerKV([kv], [kv]), lengths, 512, 1.0, 0, sinks)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[mx.array]]:
    """Inputs of the calls of both kernels, which compute nothing, because this machine may have no GPU."""
    inputs: list[list[mx.array]] = []

    def computing_nothing(**call: Any) -> list[mx.array]:
        inputs.append(call["inputs"])
        return [mx.zeros(*each) for each in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

    kernels = kernel._Kernels(computing_nothing, computing_nothing, 16)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(kernel, "_kernels", lambda: kernels)
    return inputs


@pytest.mark.parametrize("rows", ROWS)
def test_lengths_have_at_least_eight_elements(rows: int, calls: list[list[mx.array]]) -> None:
    of = list(range(1, rows + 1))
    for lengths in (mx.array(of, dtype=mx.int32), Lengths(of).padded_begins):
        calls.clear()
        call(rows, lengths)
        for given, names in zip(calls, (SPLIT_INPUTS, SUM_INPUTS), strict=True):
            padded = given[list(names).index("lengths")]
            assert padded.tolist() == of + [0] * (8 - rows)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("own", [mx.bfloat16, mx.float32])
def test_sinks_have_the_dtype_of_the_queries(dtype: mx.Dtype, own: mx.Dtype, calls: list[list[mx.array]]) -> None:
    call(2, mx.array([3, 4], dtype=mx.int32), dtype, mx.zeros((HEADS,), own))
    _, given = calls
    assert given[list(SUM_INPUTS).index("sinks")].dtype == dtype


def test_metal_compiles_the_same_text_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def made(name: str, inputs: Any, outputs: Any, body: Any, header: str) -> Callable[..., Any]:
        compiled: Any = mx.fast.metal_kernel(name, inputs, outputs, source(body, metal_text.WORDS), header)
        return partial(compiled, verbose=True)

    header = COMMON + metal_text.HEADER
    kernels = kernel._Kernels(  # pyright: ignore[reportPrivateUsage]
        made("ragged_split", SPLIT_INPUTS, SPLIT_OUTPUTS, SPLIT_BODY, header),
        made("ragged_sum", SUM_INPUTS, SUM_OUTPUTS, SUM_BODY, ""),
        int(metal_text.WORDS["query_rows"]),
    )
    monkeypatch.setattr(kernel, "_kernels", lambda: kernels)
    texts: list[str] = []
    for rows in ROWS:
        with suppress(RuntimeError):  # MLX has no Metal here, and has written the text by then.
            mx.export_function(str(tmp_path / "f"), partial(call, rows), mx.zeros((rows,), mx.int32))
        texts.append(capfd.readouterr().out)
    assert texts[0].count("lengths [[buffer") == 2
    assert all(text == texts[0] for text in texts)
