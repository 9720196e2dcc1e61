"""Sparse prefill is refused, with the reason, where it cannot be done: at the load, or for one request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import deepseek_v3, qwen3
from mlx_lm.utils import load_model

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import spec
from tests.support.models import ARCHITECTURES, VOCAB
from worker.engine.load_checks import gap_reason
from worker.errors import LoadFailed, RequestInvalid
from worker.kv.quantized import KvForm, set_kv_form
from worker.prompt.limits_and_truncation import NO_SPARSE, SparseLimits
from worker.start.checked_model import load_checked

LIMITS = SparseLimits(0.25, 1000)


def asked(keep: float | None = 0.0, **fields: Any) -> Generate:
    return Generate(1, TokensPrompt((1, 2)), Sampling(), sparse_keep=keep, **fields)


def test_a_prompt_has_the_part_that_the_request_names_or_from_a_length_on_that_of_the_model() -> None:
    assert LIMITS.keep_of(asked(), 1000, has_media=False) == 0.25
    assert LIMITS.keep_of(asked(0.5), 1000, has_media=False) == 0.5
    assert LIMITS.keep_of(asked(0.5), 999, has_media=False) == 0.5
    assert LIMITS.keep_of(asked(), 999, has_media=False) == 0.0
    assert LIMITS.keep_of(asked(None), 1000, has_media=False) == 0.0
    assert NO_SPARSE.keep_of(asked(None), 1000, has_media=True) == 0.0


@pytest.mark.parametrize(
    ("request_", "limits", "has_media", "reason"),
    [
        (asked(), NO_SPARSE, False, "This model has no sparse prefill"),
        (asked(echo=True, top_logprobs=1), LIMITS, False, "no log-probabilities of the prompt"),
        (asked(), LIMITS, True, "text only"),
    ],
)
def test_a_request_is_refused_by_name(request_: Generate, limits: SparseLimits, has_media: bool, reason: str) -> None:
    for tokens in (10, 5000):  # whatever its length
        with pytest.raises(RequestInvalid, match=reason) as refused:
            limits.keep_of(request_, tokens, has_media=has_media)
        assert refused.value.failure.param == "sparse_prefill"


def load(target: Path, **settings: Any) -> None:
    load_checked(spec(target, sparse_keep=0.25, **settings), lambda *_: None)


def test_a_model_without_a_draft_model_is_refused(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(LoadFailed, match="sparse_prefill is not possible: it takes a draft model"):
        load(model_folder("qwen3"))
    with pytest.raises(LoadFailed, match="sparse_prefill is not possible: deterministic"):
        load(model_folder("qwen3"), deterministic=True)


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_5"])
def test_a_model_whose_layers_need_every_token_is_refused(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(LoadFailed, match="a sliding window or a recurrent state, which needs every token"):
        load(model_folder(architecture), draft=str(model_folder("qwen3")))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_positions_of_these_follow_their_caches(architecture: str, model_folder: Callable[[str], Path]) -> None:
    assert gap_reason(load_model(model_folder(architecture))[0], VOCAB) == ""


@pytest.mark.parametrize("reads_codes", [True, False])
def test_positions_follow_caches_of_quantized_kv(reads_codes: bool) -> None:
    sizes = {**ARCHITECTURES["qwen3"][1], "head_dim": 64, "num_hidden_layers": 2}
    model = qwen3.Model(qwen3.ModelArgs.from_dict(sizes))
    set_kv_form(model, KvForm(4, 32, reads_codes))
    assert gap_reason(model, VOCAB) == ""


def test_positions_follow_caches_of_latent_attention() -> None:
    sizes: dict[str, Any] = {
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_hidden_layers": 2, "first_k_dense_replace": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCAB, "model_type": "deepseek_v3",
    }  # fmt: skip
    assert gap_reason(deepseek_v3.Model(deepseek_v3.ModelArgs(**sizes)), VOCAB) == ""


class _Counting(nn.Module):
    """A rotary embedding that takes positions from the number of tokens it has seen."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.calls = 0

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        self.calls += x.shape[2]
        return self.rope(x, offset=(self.calls - x.shape[2]) // 2)


def test_a_model_that_counts_positions_itself_is_refused(model_folder: Callable[[str], Path]) -> None:
    model, _ = load_model(model_folder("qwen3"))
    for layer in model.layers:
        layer.self_attn.rope = _Counting(layer.self_attn.rope)
    assert "its positions do not follow its caches" in gap_reason(model, VOCAB)
