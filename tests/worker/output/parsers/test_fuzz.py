"""No output whatever raises, hangs, or depends on how it was split."""

import random
import time

import pytest

from tests.support.scale import scaled
from tests.worker.output.parsers.replay import Case, check_shape, load_cases, random_cuts, replay
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.parser import make_parser

CASES = load_cases()
PIECES = [
    "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "'", "\\", "<think>", "</think>", "\n", " ", "<function=",
    "<parameter=", '"name": "f"', '"arguments": {', "<|", "|>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "call:f{",
    '<|"|>', "(", "=", ",", ":", "f(", "é", "<arg_key>", "</arg_key>", "<arg_value>", "```", "<|im_end|>",
    "```json\n", "functions.f:0", "call:f(a=1", ";", '"name": "f\\ud83d"', '"id": "\\ud800"', '"id": "a"',
]  # fmt: skip


def mutated(raw: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 5)):
        at = rng.randint(0, len(raw))
        end = min(len(raw), at + rng.randint(0, 20))
        match rng.randrange(4):
            case 0:
                raw = raw[:at]
            case 1:
                raw = raw[:at] + raw[end:]
            case 2:
                raw = raw[:at] + rng.choice(PIECES) + raw[at:]
            case _:
                raw = raw[:at] + raw[at:end] * 3 + raw[end:]
    return raw


@pytest.mark.parametrize("seed", range(8))
def test_mutated_and_truncated_outputs_keep_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(scaled(500, 150)):
        known = rng.choice(CASES)
        family = known.family if rng.random() < 0.7 else rng.choice(sorted(FAMILIES))
        case = Case("", family, mutated(known.raw, rng), "", "", [], known.tools, known.start_in_reasoning)
        whole = replay(case)
        check_shape(*whole)
        for cuts in (list(range(1, len(case.raw))), random_cuts(case.raw, rng)):
            assert replay(case, cuts) == whole, f"{family} {case.raw!r} cut at {cuts}"


HOSTILE = {
    "markers": "<tool_call>" * 9000,
    "opened calls": "<tool_call>{" * 8500,
    "opened keys": '<tool_call>{"' * 8000,
    "braces": "{" * 100_000,
    "brackets": "[" * 100_000,
    "depth": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 90_000,
    "white space": "<tool_call>" + " \n" * 50_000,
    "a string": '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 100_000,
    "quotes in a string": '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"' * 30_000,
    "backslashes": '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 100_000,
    "digits": '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 100_000,
    "thoughts": "<think></think>" * 7000,
    "parameters": "<tool_call>\n<function=f>\n" + "<parameter=a>\n1\n</parameter>\n" * 3500,
    "ends": "<tool_call>\n<function=f>\n<parameter=a>\n" + "\n</" * 33_000,
    "calls": "[f(" * 33_000,
    "keys": "<|tool_call>call:f{" + "a:{" * 33_000,
    "tags": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">' + "]<]minimax[>[<a>]<]minimax[>[</a>" * 2500,
    "quotes": '<|tool_call>f{a:<|"|>' + '<|"|>,a:' * 12_000,
    "words": "<|tool_call>call:f{a:" + "x " * 50_000,
    "words like keys": "<|tool_call>call:f{a:" + "x y z:" * 17_000,
    "fences": "```json\n{" * 11_000,
    "headers": "<|start|>assistant<|channel|>analysis<|message|>" * 2000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "family",
    ["hermes", "qwen3_coder", "glm47", "llama3_json", "xlam", "pythonic", "gemma4", "kimi_k2", "harmony", "minimax_m3"],
)
def test_a_hostile_output_costs_no_more_than_its_length(family: str, name: str) -> None:
    parser, raw = make_parser(family), HOSTILE[name][: scaled(None, 40_000)]
    began = time.process_time()
    for at in range(0, len(raw), 64):
        parser.feed(raw[at : at + 64])
    parser.finish()
    # Linear work takes a tenth of this; quadratic work takes minutes.
    assert time.process_time() - began < scaled(5, 2)


@pytest.mark.parametrize("family", ["hermes", "glm47", "nemotron_v3", "mistral"])
def test_considered_calls_in_reasoning_cost_no_more_than_their_length(family: str) -> None:
    for call in (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n',
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"<tool_call>{'name': 'f', 'arguments': {'a': '",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
        "<tool_call>f\n<arg_key>a</arg_key><arg_value>",
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
    ):
        parser, raw = make_parser(family, tools=[{"name": "f"}], start_in_reasoning=True), (call * 2000)[:40_000] + "x"
        began = time.process_time()
        for at in range(0, len(raw), 64):
            parser.feed(raw[at : at + 64])
        parser.finish()
        assert time.process_time() - began < scaled(5, 2)


def test_deep_arguments_stop_at_a_depth_that_every_client_can_read() -> None:
    parser = make_parser("hermes")
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 1000 + "]" * 1000 + "}}</tool_call>")
    parser.finish()
    assert parser.malformed == 1
