"""The attention kernels' text in both languages, compiled as C++ and run on the CPU."""

import re
import shutil
from pathlib import Path
from typing import Final

import mlx.core as mx
import pytest

from tests.support.scale import scaled
from tests.support.tiled_attention import plain
from tests.worker.attention.cases import Rows, deviation, rows
from tests.worker.attention.run_text import build, run
from worker.attention import cuda_text, metal_text
from worker.attention.kernel_text import SPLIT_BODY, SUM_BODY, source

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
TABLES: Final = {"cuda": cuda_text, "metal": metal_text}
# A rounded weight, and a rounded result.
LIMITS: Final = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("body", [SPLIT_BODY, SUM_BODY])
def test_both_languages_have_the_same_loops_and_meetings(body: object) -> None:
    texts = [source(body, table.WORDS) for table in TABLES.values()]  # pyright: ignore[reportArgumentType]
    assert cuda_text.WORDS.keys() == metal_text.WORDS.keys()
    assert not any("$" in text for text in texts)
    loops = [re.findall(r"for \(.*?\) \{", text) for text in texts]
    assert loops[0] == loops[1]
    assert len({text.count(table.WORDS["barrier"]) for text, table in zip(texts, TABLES.values(), strict=True)}) == 1


@pytest.mark.parametrize("language", TABLES)
def test_both_headers_offer_what_the_bodies_use(language: str) -> None:
    header = TABLES[language].HEADER
    for name in ("NEIGHBOUR", "OTHER_NEIGHBOUR", "ROW(lane)", "COLUMN(lane)", "STEPS(T, D)", "struct Keys",
                 "struct Values", "stage_queries("):  # fmt: skip
        assert name in header


FORMS = [
    ("bfloat16", 128, 0, 1, 0, False),
    ("bfloat16", 96, 0, 9, 20, True),
    ("float16", 80, 0, 3, 0, False),
    ("float16", 64, 8, 3, 0, True),
    ("float32", 64, 0, 5, 520, False),
    ("float32", 64, 4, 2, 0, False),
    ("bfloat16", 256, 8, 1, 0, False),
]


@needs_compiler
@pytest.mark.parametrize("language", TABLES)
@pytest.mark.parametrize(
    ("dtype", "dim", "bits", "tokens", "window", "has_sinks"),
    scaled(FORMS, FORMS[3:4]),
)
def test_text_computes_attention(
    language: str, dtype: str, dim: int, bits: int, tokens: int, window: int, has_sinks: bool, tmp_path: Path
) -> None:
    each = rows((0, 530), tokens, dim, dtype, bits=bits, room=560, has_sinks=has_sinks)
    library = build(tmp_path, language, dtype, dim, bits, has_sinks)

    def answer(own: Rows) -> mx.array:
        return run(library, language, own.queries, own.kv, own.lengths, own.end, own.scale, window, own.sinks)

    output = answer(each)
    expected = plain(each.queries, each.kv, each.lengths, each.end, each.scale, window, each.sinks)
    assert deviation(output, expected) < LIMITS[dtype]
    # The same bits alone and beside others, as one of several tokens and as the only one.
    assert mx.array_equal(answer(each.row(1)), output[1:])
    assert mx.array_equal(answer(each.row(1).token(tokens - 1)), output[1:, :, tokens - 1 :])
