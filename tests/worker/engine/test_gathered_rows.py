"""The bound of a forward pass of a model with experts, seen at the experts themselves."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.switch_layers import SwitchGLU
from msgspec.structs import replace

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB
from worker.engine.scheduling.pacing import ChunkPolicy
from worker.model.experts import MAX_GATHERED_ROWS, chosen_of, pass_tokens
from worker.tools.verify.verifier import NoisyDrafts

ROWS = 6


def requests() -> list[Generate]:
    rng = random.Random(5)
    return [
        Generate(
            rid,
            TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(length))),
            Sampling(temperature=float(rid % 2), seed=rid, ignore_eos=True),
            max_tokens=8,
        )
        for rid, length in enumerate((5, 170, 90, 200, 12, 120))
    ]


def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that each call of a layer's experts gathers from now on."""
    counts: list[int] = []
    call = SwitchGLU.__call__

    def counting(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        counts.append(indices.size)
        return call(self, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", counting)
    return counts


def test_the_experts_of_a_pass_never_gather_more_rows_than_the_bound(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = gathered(monkeypatch)
    plain = spec(model_folder("qwen3_moe"), max_running=ROWS, prefill_chunk=512)
    with EngineHarness(plain) as engine:
        counts.clear()
        whole = engine.run(requests())
        assert engine.loaded.experts_per_token == 2
        assert engine.loaded.pass_tokens == MAX_GATHERED_ROWS // 2
    widest, most = max(counts), 2 * 120
    drafter = NoisyDrafts(VOCAB)
    for request, result in zip(requests(), whole, strict=True):
        drafter.learn([*request.prompt.ids, *result.ids])
    counts.clear()
    monkeypatch.setattr("worker.model.experts.MAX_GATHERED_ROWS", most)
    with EngineHarness(plain, drafter=drafter) as engine:
        bounded = engine.run(requests())

    assert drafter.accepted > 0
    assert widest > most  # without the bound, prompts that arrive together are one pass
    assert 0 < max(counts) <= most
    assert [each.ids for each in bounded] == [each.ids for each in whole]


def test_chunks_of_all_rows_and_the_blocks_beside_them_stay_within_a_pass() -> None:
    policy = ChunkPolicy(512, pass_tokens=pass_tokens(8), block_tokens=16)

    assert pass_tokens(8) == 4096
    for prefilling in range(1, 129):
        for decoding in range(0, 256 - prefilling, 5):
            tokens = policy.chunk(prefilling, decoding).tokens
            assert tokens >= 1
            assert (prefilling * tokens + decoding * 16) * 8 <= MAX_GATHERED_ROWS
    assert policy.chunk(1, 0).tokens == 512
    assert policy.chunk(16, 0).tokens == 256


def test_a_fixed_chunk_of_a_lone_prompt_is_bounded_as_well() -> None:
    assert ChunkPolicy(65_536, is_fixed=True, pass_tokens=pass_tokens(8)).chunk(1, 0).tokens == 4096
    assert ChunkPolicy(65_536, is_fixed=True).chunk(1, 0).tokens == 65_536


def test_drafts_are_off_where_the_blocks_of_all_rows_would_exceed_a_pass(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.model.experts.MAX_GATHERED_ROWS", 2 * 16 * ROWS - 1)
    with EngineHarness(spec(model_folder("qwen3_moe"), max_running=ROWS, speculate="auto")) as engine:
        assert engine.engine.speculation.startswith("off, because the experts of a pass")
    with EngineHarness(spec(model_folder("qwen3_moe"), max_running=ROWS - 1, speculate="auto")) as engine:
        assert engine.engine.speculation.startswith("auto")


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"text_config": {"top_k_experts": 8}}, 8),
        ({"moe_topk": [2, 4, 4]}, 4),
        ({"ffn_config": {"moe_top_k": 4}}, 4),
        ({}, 16),
    ],
)
def test_the_experts_per_token_are_read_from_the_configuration(config: dict[str, Any], chosen: int) -> None:
    assert chosen_of(config, 64) == chosen


def test_a_model_without_experts_has_no_bound(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(replace(spec(model_folder("qwen3")), max_running=1)) as engine:
        assert engine.loaded.pass_tokens == 0
