"""Scoring of the demo model's answers."""

from typing import Any

import pytest

from deploy.demo_model.corpus.generate import held_out_samples
from deploy.demo_model.corpus.samples import Sample
from deploy.demo_model.evaluate.backends import Reply, parse
from deploy.demo_model.evaluate.measure import is_right, markdown, measure


def expected(sample: Sample) -> Reply:
    last = sample.messages[-1]
    calls = [call["function"] for call in last.get("tool_calls") or ()]
    return Reply(last["content"] or "", last.get("reasoning_content") if sample.thinking else None, calls, stopped=True)


def test_the_expected_answers_are_right_and_silence_is_not() -> None:
    table = measure(lambda samples: [expected(s) for s in samples], lambda category: held_out_samples(category, 30))
    assert all(good == seen for good, seen in table.values())
    silent = measure(
        lambda samples: [Reply("", None, [], stopped=False) for _ in samples],
        lambda category: held_out_samples(category, 10),
    )
    assert all(silent[name][0] == 0 for name in silent if name not in ("no tool call", "clean", "tool results"))
    assert "| stops | 0 |" in markdown(silent)


def test_raw_text_is_taken_apart() -> None:
    reply = parse(
        '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', stopped=True
    )
    assert (reply.thought, reply.text, reply.calls) == ("why", "", [{"name": "f", "arguments": {"a": 1}}])


def test_a_malformed_call_stays_in_the_text() -> None:
    assert parse("<tool_call>\n{oops\n</tool_call>", stopped=True).calls == []
    assert "<tool_call>" in parse("<tool_call>\n{oops\n</tool_call>", stopped=True).text


@pytest.mark.parametrize(("value", "right"), [(1, True), (True, False), ("1", False), (2, False)])
def test_an_argument_of_another_type_is_wrong(value: Any, right: bool) -> None:
    wanted = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    sample = Sample("tool call", [{"role": "user", "content": "go"}, wanted], "calls", tools=[{}])
    assert is_right(sample, Reply("", None, [{"name": "f", "arguments": {"a": value}}], stopped=True)) is right
