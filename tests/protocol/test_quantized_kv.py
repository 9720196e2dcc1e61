"""Reasons why a model cannot have its KV quantized, from its configuration, and sizes of what is kept."""

from typing import Any

import pytest

from protocol.checkpoint import group_of_all, number_bits, obstacle

PLAIN = {"model_type": "qwen3", "num_attention_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("changes", "bits", "reason"),
    [
        ({}, 8, ""),
        ({}, 4, ""),
        ({"kv_lora_rank": 512}, 8, "latent vector"),
        ({"kv_lora_rank": None}, 8, ""),
        ({"layer_types": ["sliding_attention", "linear_attention"]}, 8, "none of its layers"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 8, ""),
        ({"head_dim": 80}, 8, "80 numbers"),
        ({"model_type": "qwen2"}, 8, ""),
        ({"model_type": "qwen2_moe"}, 4, "use kv_bits = 8"),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2"}}, 4, "use kv_bits = 8"),
    ],
)
def test_a_configuration_says_why_not(changes: dict[str, Any], bits: int, reason: str) -> None:
    why = obstacle(PLAIN | changes, bits)
    assert reason in why
    assert bool(why) == bool(reason)


def test_a_group_divides_the_heads_of_all_layers() -> None:
    assert (group_of_all({128}), group_of_all({128, 96}), group_of_all({32})) == (64, 32, 32)
    with pytest.raises(ValueError, match="48 numbers"):
        group_of_all({64, 48})


def test_scales_and_biases_are_counted_with_the_codes() -> None:
    assert (number_bits(8, 64, 2), number_bits(4, 64, 2), number_bits(4, 32, 2), number_bits(8, 64, 4)) == (
        8.5,
        4.5,
        5,
        9,
    )
