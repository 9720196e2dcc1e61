"""Which answers of the demo model count as right."""

from typing import Any

import pytest

from deploy.demo_model.corpus.generate import CATEGORIES, held_out_samples
from deploy.demo_model.corpus.samples import Sample
from tests.support.demo_answers import DemoReply, is_right, parse


def expected(sample: Sample) -> DemoReply:
    last = sample.messages[-1]
    calls = [call["function"] for call in last.get("tool_calls") or ()]
    return DemoReply(
        last["content"] or "", last.get("reasoning_content") if sample.thinking else None, calls, stopped=True
    )


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_expected_answers_are_right_and_another_text_is_not(category: str) -> None:
    for sample in held_out_samples(category, 10):
        assert is_right(sample, expected(sample))
        assert sample.check == "calls" or not is_right(sample, DemoReply("zorblax", None, [], stopped=True))


def test_raw_text_is_taken_apart() -> None:
    reply = parse(
        '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', stopped=True
    )
    assert (reply.thought, reply.text, reply.calls) == ("why", "", [{"name": "f", "arguments": {"a": 1}}])
    assert "<tool_call>" in parse("<tool_call>\n{oops\n</tool_call>", stopped=True).text


@pytest.mark.parametrize(("value", "right"), [(1, True), (True, False), ("1", False), (2, False)])
def test_an_argument_of_another_type_is_wrong(value: Any, right: bool) -> None:
    wanted = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    sample = Sample("tool call", [{"role": "user", "content": "go"}, wanted], "calls", tools=[{}])
    assert is_right(sample, DemoReply("", None, [{"name": "f", "arguments": {"a": value}}], stopped=True)) is right
