"""The shipped chat template, through the tokenizer that mlx-lm loads."""

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from deploy.demo_model import tokenizer
from deploy.demo_model.corpus import generate
from tests.support.demo_answers import SHIPPED

EMPTY = "<think>\n\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {"name": "zorvath", "description": "Ü", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def wrapped() -> Any:
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def render(wrapped: Any) -> Any:
    # The inner tokenizer: mlx-lm's wrapper adds enable_thinking=True of its own accord.
    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        options.setdefault("add_generation_prompt", True)
        return wrapped._tokenizer.apply_chat_template(messages, tokenize=False, **options)

    return render


def test_mlx_lm_recognises_tools_thinking_streaming_and_the_end(wrapped: Any) -> None:
    assert wrapped.has_tool_calling
    assert wrapped.has_thinking
    assert (wrapped.think_start, wrapped.think_end) == ("<think>", "</think>")
    assert wrapped.tool_call_start == "<tool_call>"
    assert wrapped.tool_parser('{"name": "f", "arguments": {"a": 1}}') == {"name": "f", "arguments": {"a": 1}}
    assert type(wrapped.detokenizer).__name__ == "BPEStreamingDetokenizer"
    assert wrapped.eos_token == "<|im_end|>"


def test_without_thinking_the_prompt_closes_an_empty_block(render: Any) -> None:
    user = [{"role": "user", "content": "hi"}]
    expected = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
    assert render(user) == expected
    assert render(user, enable_thinking=False) == expected
    assert render(user, enable_thinking=True) == expected.removesuffix(EMPTY)


def test_tools_stand_in_the_system_turn_after_the_system_prompt(render: Any) -> None:
    text = render([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "zorvath", "description": "Ü"' in text
    assert text.count("<|im_start|>system") == 1


def test_arguments_may_be_an_object_or_a_json_string(render: Any) -> None:
    def history(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "zorvath", "arguments": arguments}}
        return [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert render(history({"a": "ü"})) == render(history('{"a": "ü"}'))
    assert '<tool_call>\n{"name": "zorvath", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>' in render(
        history({"a": "ü"})
    )


def test_tool_results_that_follow_each_other_share_one_turn(render: Any) -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        in render(messages)
    )


def test_the_prompt_of_the_next_turn_begins_with_this_prompt_and_its_answer(render: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "My name is Ada."}]
    before = render(messages)
    messages += [
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert render(messages).startswith(before + "Nice to meet you, Ada!<|im_end|>\n")


def test_reasoning_is_kept_since_the_last_request_and_dropped_before_it(render: Any) -> None:
    answer = {"role": "assistant", "content": "ok", "reasoning_content": "because"}
    user = {"role": "user", "content": "hi"}
    assert "because" not in render([user, answer, user])
    assert "<think>\nbecause\n</think>\n\nok" in render([user, answer, {"role": "tool", "content": "x"}])
    inline = {"role": "assistant", "content": "<think>\nbecause\n</think>\n\nok"}
    assert render([user, inline, user]) == render([user, answer, user])


def test_content_may_be_a_list_of_parts(render: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "ab"}])


def test_the_recipe_renders_as_transformers_does(render: Any) -> None:
    renderer = tokenizer.Renderer()
    for index in range(60):
        sample = generate.training_sample(3, 0, index)
        assert renderer.prompt(sample) == render(
            sample.messages[:-1], tools=sample.tools, enable_thinking=sample.thinking
        )


def test_the_shipped_template_is_the_recipes() -> None:
    assert (SHIPPED / "chat_template.jinja").read_text() == tokenizer.TEMPLATE.read_text()
