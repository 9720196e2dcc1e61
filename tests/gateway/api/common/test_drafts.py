"""A request says in each dialect what a draft model may do, and what it expects of its answer."""

import json
from itertools import count
from typing import Any

import pytest
from msgspec.json import encode

from gateway.api.anthropic.request import decode_messages, lower_messages
from gateway.api.anthropic.response import AnthropicUsage as MessagesUsage
from gateway.api.ollama.request import decode_chat as decode_ollama_chat
from gateway.api.ollama.request import lower_chat as lower_ollama_chat
from gateway.api.openai.lowering import lower_chat, lower_completion
from gateway.api.openai.request import decode_chat, decode_completion
from gateway.api.openai.response import sum_usage
from gateway.api.responses.lowering import lower_prompt, lower_responses
from gateway.api.responses.request import decode_responses, toolbox
from gateway.api.responses.response import ResponseUsage as ResponsesUsage
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError
from protocol.from_worker import Usage
from protocol.to_worker import Generate

MODEL = ModelConfig(name="m", path="m")
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Generate:
    request, unknown = decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())
    assert not unknown
    return lower_chat(request, MODEL, count(1).__next__, 7)[0]


def completion(**fields: Any) -> Generate:
    request, unknown = decode_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    assert not unknown
    return lower_completion(request, MODEL, count(1).__next__, 7)[0]


def messages(**fields: Any) -> Generate:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 8, **fields}
    request, unknown = decode_messages(json.dumps(body).encode())
    assert not unknown
    return lower_messages(request, MODEL, count(1).__next__, 7)


def responses(**fields: Any) -> Generate:
    request, unknown = decode_responses(json.dumps({"model": "m", "input": "hi", **fields}).encode())
    assert not unknown
    prompt, _ = lower_prompt(request, toolbox(request), ())
    return lower_responses(request, prompt, MODEL, count(1).__next__, 7)


def ollama(**fields: Any) -> Generate:
    request, unknown = decode_ollama_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())
    assert not unknown
    return lower_ollama_chat(request, MODEL, count(1).__next__, 7)


DIALECTS = [chat, completion, messages, responses]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("wish", "most"), [(None, None), (True, None), (False, 0), ({"most": 0}, 0), ({"most": 12}, 12)]
)
def test_the_most_tokens_of_a_draft_are_the_requests(dialect: Any, wish: Any, most: int | None) -> None:
    assert dialect(speculate=wish).most_drafted == most
    assert dialect().most_drafted is None


@pytest.mark.parametrize("dialect", [*DIALECTS, ollama])
@pytest.mark.parametrize(
    ("wish", "keep"), [(None, None), (False, None), (True, 0.0), ({"keep": 0.4}, 0.4), ({"keep": 1}, 1.0)]
)
def test_the_kept_part_of_a_prompt_is_the_requests(dialect: Any, wish: Any, keep: float | None) -> None:
    assert dialect(sparse_prefill=wish).sparse_keep == keep
    assert dialect().sparse_keep is None


@pytest.mark.parametrize("dialect", [*DIALECTS, ollama])
@pytest.mark.parametrize("wish", ["on", 0.5, {"keep": 0}, {"keep": 1.1}, {"most": 2}, {}])
def test_another_part_is_refused_by_name(dialect: Any, wish: Any) -> None:
    with pytest.raises(ApiError) as refused:
        dialect(sparse_prefill=wish)
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith("sparse_prefill")


def test_kept_tokens_are_told_in_the_usage_of_each_dialect_and_only_then() -> None:
    sparse, whole = Usage(9000, 0, 7, kept=2304), Usage(9000, 0, 7)
    details = sum_usage([sparse, sparse, whole], 2).prompt_tokens_details
    assert (details.kept_tokens, json.loads(encode(details))["kept_tokens"]) == (2304, 2304)
    assert "kept" not in encode(sum_usage([whole], 1)).decode()
    for body in (ResponsesUsage, MessagesUsage):
        assert '_tokens":2304' in encode(body.of(sparse)).decode()
        assert "kept" not in encode(body.of(whole)).decode()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("wish", ["off", 3, {"most": -1}, {"most": 2, "least": 1}, {}])
def test_another_value_is_refused_by_name(dialect: Any, wish: Any) -> None:
    with pytest.raises(ApiError) as refused:
        dialect(speculate=wish)
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith("speculate")


@pytest.mark.parametrize("content", ["a b c", [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]])
def test_a_prediction_goes_along_as_text(content: Any) -> None:
    assert chat(prediction={"type": "content", "content": content}).prediction == "a b c"
    assert chat().prediction == ""


def test_the_tokens_of_a_prediction_are_told_right_and_wrong() -> None:
    with_prediction, without = (
        sum_usage([Usage(9, 0, 7, predicted=predicted, accepted=4)], 1).completion_tokens_details
        for predicted in (6, 4)
    )
    assert (with_prediction.accepted_prediction_tokens, with_prediction.rejected_prediction_tokens) == (4, 2)
    assert without.rejected_prediction_tokens == 0
