"""The data generator: repeatable, well formed, and apart from what is measured."""

import hashlib
import json

import pytest

from deploy.demo_model.corpus import generate
from deploy.demo_model.corpus.words import RARE, Source, is_held_out, own_words
from deploy.demo_model.tokenizer import MARKS, SPECIAL


def test_the_data_is_that_of_the_shipped_weights() -> None:
    digest = hashlib.sha256()
    for index in range(1000):
        digest.update(json.dumps(generate.training_sample(generate.SEED, 0, index).messages).encode())
    assert digest.hexdigest()[:16] == "ce51bb36296d6051"


@pytest.mark.parametrize("category", generate.CATEGORIES)
def test_every_category_has_held_out_samples_that_end_with_an_answer(category: str) -> None:
    for sample in generate.held_out_samples(category, 40):
        answer = sample.messages[-1]
        assert answer["role"] == "assistant"
        assert answer["content"] or answer["tool_calls"]
        assert sample.thinking == (category == "thinking")


def test_no_text_holds_a_special_token() -> None:
    for index in range(300):
        text = json.dumps(generate.training_sample(1, 1, index).messages)
        assert not any(mark in text for mark in (*SPECIAL, *MARKS))


def test_every_call_fits_the_schema_of_its_tool() -> None:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    for index in range(400):
        sample = generate.make(Source(f"schema {index}"), category="tool call")
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()}
        for call in sample.messages[-1]["tool_calls"]:
            parameters = tools[call["function"]["name"]]
            arguments = call["function"]["arguments"]
            assert set(parameters.get("required", ())) <= set(arguments)
            for name, value in arguments.items():
                shape = parameters["properties"][name]
                assert isinstance(value, kinds[shape["type"]])
                assert "enum" not in shape or value in shape["enum"]


def test_made_up_words_belong_to_one_split_only() -> None:
    assert all(not is_held_out(Source(f"train {n}").coined()) for n in range(300))
    assert all(is_held_out(Source(f"measure {n}", held_out=True).coined()) for n in range(300))


def test_rare_words_are_not_training_words() -> None:
    assert not set(RARE) & set(own_words())
    assert "ottoline" not in own_words()
