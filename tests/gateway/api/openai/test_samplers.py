"""Samplers and limits of tokens beyond OpenAI's, as they are lowered."""

import json
from typing import Any

import pytest

from gateway.api.openai.lowering import lower_chat, lower_completion
from gateway.api.openai.request import BREAKERS, decode_chat, decode_completion
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest
from protocol.to_worker import Generate, Sampling, TextPrompt

MODEL = ModelConfig(name="m", path="m", sampling=SamplingDefaults(repetition_penalty=1.2))


def completion(**fields: Any) -> Generate:
    request, unknown = decode_completion(json.dumps({"prompt": "x"} | fields).encode())
    assert unknown == []
    return lower_completion(request, MODEL, lambda: 1, 5)[0]


def sampling(**fields: Any) -> Sampling:
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    own = lower_chat(decode_chat(json.dumps(body).encode())[0], MODEL, lambda: 1, 5)[0].sampling
    assert own == completion(**fields).sampling
    return own


def test_each_field_is_lowered_in_both_apis() -> None:
    own = sampling(
        min_tokens=2,
        stop_token_ids=[3],
        allowed_token_ids=[1, 2],
        bad_words=["a", ""],
        typical_p=0.5,
        top_n_sigma=1.5,
        xtc_probability=0.25,
        xtc_threshold=0.2,
    )

    assert (own.min_tokens, own.stop_ids, own.allowed_ids, own.bad_words) == (2, (3,), (1, 2), ("a",))
    assert (own.typical_p, own.top_n_sigma, own.xtc_probability, own.xtc_threshold) == (0.5, 1.5, 0.25, 0.2)
    assert completion(include_stop_str_in_output=True, stop="x").includes_stop


@pytest.mark.parametrize(
    ("fields", "window", "penalty"),
    [
        ({}, 0, 1.2),
        ({"repeat_last_n": 64}, 64, 1.2),
        ({"repetition_context_size": 20}, 20, 1.2),
        ({"repetition_context_size": 0}, 0, 1.2),
        ({"repeat_last_n": -1}, 0, 1.2),
        ({"repeat_last_n": 0}, 0, 1.0),
        ({"repeat_penalty": 1.5}, 0, 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, 0, 1.1),
    ],
)
def test_a_window_of_penalties_is_in_llama_cpps_words_or_mlx_lms(
    fields: dict[str, Any], window: int, penalty: float
) -> None:
    own = sampling(**fields)

    assert (own.penalty_window, own.repetition_penalty) == (window, penalty)


def test_dry_has_the_breakers_of_its_first_implementation_unless_others_are_named() -> None:
    usual = sampling(dry_multiplier=0.8)
    own = sampling(dry_multiplier=0.8, dry_sequence_breakers='["b", "a"]', dry_penalty_last_n=512, dry_base=1.5)

    assert (usual.dry_multiplier, usual.dry_breakers, usual.dry_window) == (0.8, BREAKERS, 0)
    assert (own.dry_breakers, own.dry_window, own.dry_base) == (("a", "b"), 512, 1.5)
    assert sampling(dry_multiplier=0.8, dry_penalty_last_n=0).dry_multiplier == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"dynamic_temperature": True}, "dynamic_temperature"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
    ],
)
def test_what_is_not_served_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        sampling(**fields)
    assert refused.value.param == param


def test_neutral_values_of_what_is_not_served_are_taken() -> None:
    neutral = {"mirostat_mode": 0, "dynatemp_range": 0, "use_beam_search": False, "top_n_sigma": -1, "typical_p": 1}

    assert sampling(**neutral) == sampling()


def test_a_limit_of_tokens_is_in_llama_cpps_word_too() -> None:
    assert [completion(**fields).max_tokens for fields in ({}, {"n_predict": 3}, {"n_predict": -1})] == [16, 3, None]
    assert completion(n_predict=3, max_tokens=4).max_tokens == 4
    assert completion(max_tokens=-1).max_tokens is None
    with pytest.raises(BadRequest, match="n_predict"):
        sampling(n_predict=0)


def test_special_tokens_around_a_prompt_are_left_out_where_that_is_asked_for() -> None:
    assert completion().prompt == TextPrompt("x")
    assert completion(add_special_tokens=False).prompt == TextPrompt("x", adds_special=False)


def test_biases_are_of_ids_or_of_texts_in_openais_words_and_in_llama_cpps() -> None:
    both = sampling(logit_bias={"5": 1, "yes": -2.5, " no": 3})
    assert both.logit_bias == {5: 1}
    assert both.bias_texts == (("yes", -2.5), (" no", 3))
    listed = sampling(logit_bias=[[5, 1], ["7", -1], ["yes", 2]])
    assert listed.logit_bias == {5: 1}
    assert listed.bias_texts == (("7", -1), ("yes", 2))


def test_special_tokens_are_part_of_the_text_where_they_are_asked_for() -> None:
    assert completion(skip_special_tokens=False).shows_special
    assert not completion(skip_special_tokens=True).shows_special
    assert not completion().shows_special
