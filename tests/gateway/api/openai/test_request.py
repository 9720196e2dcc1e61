import json
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai.lowering import derive_seed, lower_chat, lower_completion
from gateway.api.openai.request import decode_chat, decode_completion
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import ApiError, BadRequest
from protocol.codec import decode_down, encode
from protocol.to_worker import ChatPrompt, Generate, TextPrompt, TokensPrompt

MODEL = ModelConfig(name="m", path="m")
HI = [{"role": "user", "content": "hi"}]


def chat(config: ModelConfig = MODEL, /, **fields: Any) -> list[Generate]:
    request, _ = decode_chat(json.dumps({"model": "m", "messages": HI} | fields).encode())
    return lower_chat(request, config, count(1).__next__, 7 if request.seed is None else request.seed)


def completion(config: ModelConfig = MODEL, /, **fields: Any) -> list[Generate]:
    request, _ = decode_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())
    return lower_completion(request, config, count(1).__next__, 7)


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_plain_chat_request_gets_openais_defaults() -> None:
    [generate] = chat()

    assert generate.prompt == ChatPrompt([{"role": "user", "content": "hi"}])
    assert generate.sampling.temperature == 1.0
    assert generate.max_tokens is None
    assert generate.top_logprobs is None
    assert decode_down(encode(generate)) == generate


def test_every_sampling_field_reaches_the_engine() -> None:
    [generate] = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "7": 3.5},
        seed=42,
        ignore_eos=True,
        stop="END",
        max_tokens=5,
    )

    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 2, 1.1)
    assert sampling.logit_bias == {5: -100, 7: 3.5}
    assert sampling.ignore_eos
    assert generate.stop == ("END",)
    assert generate.max_tokens == 5


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9)[0].max_tokens == 9


def test_top_k_minus_one_is_off() -> None:
    assert chat(top_k=-1)[0].sampling.top_k == 0


def test_model_defaults_apply_only_where_the_request_is_silent() -> None:
    model = ModelConfig(name="m", path="m", sampling=SamplingDefaults(temperature=0.3, top_k=20, max_tokens=99))

    [silent] = chat(model)
    assert (silent.sampling.temperature, silent.sampling.top_k, silent.max_tokens) == (0.3, 20, 99)
    [asked] = chat(model, temperature=0, top_k=-1, max_tokens=1)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.max_tokens) == (0, 0, 1)


def test_choices_have_their_own_rids_and_seeds_and_the_first_has_the_requests_seed() -> None:
    generates = chat(n=4, seed=42)

    assert [generate.rid for generate in generates] == [1, 2, 3, 4]
    seeds = [generate.sampling.seed for generate in generates]
    assert len(set(seeds)) == 4
    assert seeds == [derive_seed(42, index) for index in range(4)]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 5000))
def test_a_derived_seed_always_fits_the_wire(seed: int, choice: int) -> None:
    assert 0 <= derive_seed(seed, choice) < 1 << 63


def test_text_parts_become_one_string_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [generate] = chat(messages=[{"role": "developer", "content": parts}, *HI])

    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.messages[0] == {"role": "system", "content": "ab"}


def test_an_assistants_reasoning_is_handed_to_the_template() -> None:
    echoed = {"role": "assistant", "content": None, "reasoning_content": "hmm"}
    [generate] = chat(messages=[*HI, echoed, *HI])

    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hmm"}


def test_thinking_fields_reach_the_engine() -> None:
    [generate] = chat(chat_template_kwargs={"x": 1}, enable_thinking=True, reasoning_effort="low", thinking_budget=100)

    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.template_kwargs == {"x": 1}
    assert (generate.prompt.thinking, generate.prompt.effort, generate.thinking_budget) == (True, "low", 100)


def test_no_effort_is_no_thinking() -> None:
    [generate] = chat(reasoning_effort="none")

    assert isinstance(generate.prompt, ChatPrompt)
    assert (generate.prompt.thinking, generate.prompt.effort) == (False, "")


def test_the_last_assistant_message_can_be_continued() -> None:
    [generate] = chat(messages=[*HI, {"role": "assistant", "content": "Sure"}], continue_final_message=True)

    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.continue_final
    assert refused(chat, continue_final_message=True).param == "continue_final_message"
    begun = [*HI, {"role": "assistant", "content": "Sure", "prefix": True}]
    assert chat(messages=begun)[0].prompt == generate.prompt
    assert chat(messages=begun, add_generation_prompt=False)[0].prompt == generate.prompt
    assert refused(chat, add_generation_prompt=False).param == "add_generation_prompt"


def test_the_first_tokens_of_a_chat_may_be_cut_as_those_of_a_text() -> None:
    [generate] = chat(truncate_prompt_tokens=-1)
    assert (generate.truncate, generate.cuts_tokens) == (-1, True)
    [generate] = chat(truncate_prompt_tokens=7)
    assert (generate.truncate, generate.cuts_tokens) == (7, True)
    [generate] = chat()
    assert (generate.truncate, generate.cuts_tokens) == (0, False)
    assert refused(chat, truncate_prompt_tokens=-2).param == "truncate_prompt_tokens"


@pytest.mark.parametrize("lowered", [chat, completion])
def test_choices_of_a_prompt_are_told_of_it_once_and_each_in_a_stream(lowered: Any) -> None:
    fields = {"return_token_ids": True, "prompt_logprobs": 3, "n": 3}
    generates = lowered(**fields)
    assert [(each.prompt_ids, each.prompt_logprobs) for each in generates] == [(True, 3), *[(False, None)] * 2]
    generates = lowered(stream=True, **fields | {"prompt_logprobs": 0})
    assert [(each.prompt_ids, each.prompt_logprobs) for each in generates] == [(True, None)] * 3
    assert [(each.prompt_ids, each.prompt_logprobs) for each in lowered()] == [(False, None)]
    for bad in ({"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        assert refused(lowered, **bad).param == "prompt_logprobs"


def test_logprobs_of_chat_are_a_flag_and_a_count() -> None:
    assert chat(logprobs=True)[0].top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20)[0].top_logprobs == 20
    assert chat(logprobs=False)[0].top_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "zzz"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"repetition_penalty": 1e7}, "repetition_penalty"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {str(at) + "x": 1 for at in range(257)}}, "logit_bias"),
        ({"logit_bias": [["", 1]]}, "logit_bias[0][0]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1024, "x" * 1025]}, "stop[1]"),
        ({"stop": "x" * 1025}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": 10**40}, "seed"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": 10**30}}, "chat_template_kwargs"),
    ],
)
def test_bad_values_name_their_parameter(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"prediction": {"type": "diff", "content": "a"}}, "prediction.type"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[0].tool_calls[0].type"),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)

    assert error.param == param
    assert error.code == "unsupported_parameter"
    assert "supported" in error.message


@pytest.mark.parametrize(
    ("part", "param", "word"),
    [
        ({"type": "file"}, "messages[0].content[0].file", "required"),
        ({"type": "file", "file": {"filename": "a.pdf"}}, "messages[0].content[0].file.file_data", "required"),
        ({"type": "file", "file": {"file_id": "f"}}, "messages[0].content[0].file.file_id", "no uploaded files"),
        ({"type": "input_file", "file_data": "x"}, "messages[0].content[0]", "as parts of type 'file'"),
    ],
)
def test_a_file_that_is_not_in_the_request_is_refused(part: dict[str, Any], param: str, word: str) -> None:
    error = refused(chat, messages=[{"role": "user", "content": [part]}])

    assert error.param == param
    assert word in error.message


def test_fields_that_need_no_action_are_accepted_and_unknown_ones_are_reported() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x", "zap": 1, "cache_control": {}}],
        "user": "u",
        "metadata": {},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "parallel_tool_calls": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "stream_options": None,
        "zip": 1,
        "zap": [1, {"a": 2}],
    }

    _, unknown = decode_chat(json.dumps(body).encode())

    assert unknown == ["zip", "zap", "messages.zap"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "m"}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "zzz": "\xff", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "zzz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_chat(body)


def test_duplicate_keys_are_tolerated_and_the_last_one_counts() -> None:
    request, _ = decode_chat(b'{"model": "a", "model": "b", "messages": [{"role": "user", "content": "x"}]}')

    assert request.model == "b"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [TextPrompt("hi")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2, 3], [TokensPrompt((1, 2, 3))]),
        ([[1, 2], [3]], [TokensPrompt((1, 2)), TokensPrompt((3,))]),
    ],
)
def test_a_completion_prompt_comes_in_four_shapes(prompt: Any, expected: list[Any]) -> None:
    assert [generate.prompt for generate in completion(prompt=prompt)] == expected


def test_the_choices_of_a_prompt_stand_side_by_side() -> None:
    generates = completion(prompt=["a", "b"], n=2)

    assert [generate.prompt for generate in generates] == [TextPrompt(text) for text in "aabb"]


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, [2]], [-1], [1.5], None, {}, [True], [1 << 40]]
)
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    assert str(refused(completion, prompt=prompt).param).startswith("prompt")


def test_completions_generate_16_tokens_unless_told_otherwise() -> None:
    assert completion()[0].max_tokens == 16
    assert completion(max_tokens=3)[0].max_tokens == 3
    model = ModelConfig(name="m", path="m", sampling=SamplingDefaults(max_tokens=50))
    assert completion(model)[0].max_tokens == 50


def test_zero_tokens_only_make_sense_with_echo() -> None:
    assert completion(echo=True, max_tokens=0)[0].max_tokens == 0
    assert refused(completion, max_tokens=0).param == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_what_completions_do_not_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(completion, **fields).param == param


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = [
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "logit_bias",
    "stream",
    "max_tokens",
    "tools",
    "tool_choice",
    "logprobs",
    "top_logprobs",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_choice",
    "stream_options",
    "chat_template_kwargs",
    "echo",
    "suffix",
    "best_of",
    "user",
    "zzz",
]


@given(st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=8))
def test_no_body_causes_anything_but_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    for call in (chat, completion):
        with suppress(BadRequest):
            for generate in call(**fields):
                assert decode_down(encode(generate)) == generate
