"""Python calls: text that Python can read means what Python says, and quotes that are not escaped cost little."""

import ast
import json
import random
import time
from typing import Any

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, random_cuts, replay, text_of
from worker.output.parsers.parser import make_parser

ALPHABET = "ab1=,:;()[]{}<>|\"'\\/ \n\t+.%é#$&"
WRAPS = {
    "lfm2_pythonic": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "llama4_pythonic": "<|python_start|>[{}]<|python_end|>",
    "olmo3_pythonic": "<function_calls>\n{}\n</function_calls>",
    "pythonic": "[{}]",
}


def a_string(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, 12)))


def a_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 3 else 4):
        case 0:
            return rng.choice([None, True, False, 0, -7, 1.5, 10**6])
        case 1 | 2 | 3:
            return a_string(rng)
        case 4:
            return tuple(a_value(rng, depth + 1) for _ in range(rng.randint(2, 3)))
        case 5:
            return {a_string(rng): a_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
        case _:
            return [a_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]


@pytest.mark.parametrize("family", WRAPS)
def test_calls_that_python_can_read_are_read_as_python_reads_them(family: str) -> None:
    rng = random.Random(family)
    for _ in range(60):
        calls = [{f"k{n}": a_value(rng) for n in range(rng.randint(0, 3))} for _ in range(rng.randint(1, 3))]
        separator = rng.choice([", ", ","]) if family != "olmo3_pythonic" else "\n"
        text = separator.join(f"f({', '.join(f'{key}={value!r}' for key, value in call.items())})" for call in calls)
        after = rng.choice(["", "\nDone.", "\n\n**Done**", " (done)", "Done", "\n- one\n- two", '\n"x"', " 完成"])
        case = Case("", family, WRAPS[family].format(text) + after, "", "", [], [], False)
        assert ast.parse(f"[{text}]" if separator != "\n" else text)
        events, malformed = replay(case)
        assert [json.loads(call.arguments) for call in calls_of(events)] == json.loads(json.dumps(calls)), case.raw
        assert malformed == 0
        assert text_of(events, DeltaKind.TEXT).strip() == after.strip()
        assert replay(case, range(1, len(case.raw))) == (events, malformed)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_no_split_changes_what_a_string_with_inner_quotes_is(quote: str) -> None:
    rng = random.Random(quote)
    pieces = [quote, " ", ",", ")", "]", "}", "=", "x=", ":", "f(", "<", "</a>", "<|", "\\", "word", "\n", ".j(", "+ "]
    for _ in range(400):
        inner = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        form = rng.choice(["f(a={})", "f(a=[1, {}])", "f(a={{'k': {}}})", "f(a={{{}: 1}})"])
        call = form.format(quote + inner + quote)
        family = rng.choice(sorted(WRAPS))
        case = Case("", family, WRAPS[family].format(call), "", "", [], [], False)
        whole = replay(case)
        for cuts in (range(1, len(case.raw)), random_cuts(case.raw, rng)):
            assert replay(case, cuts) == whole, f"{case.family} {case.raw!r}"


@pytest.mark.parametrize("text", ['" ', '",', '")', '")]', '" , a', '"), f( ', '"\n' + " " * 300, '"' + ")]" * 9])
def test_inner_quotes_cost_no_more_than_their_number(text: str) -> None:
    parser = make_parser("lfm2_pythonic")
    began = time.process_time()
    raw = '<|tool_call_start|>[f(a="' + text * (50_000 // len(text))
    for at in range(0, len(raw), 16):
        parser.feed(raw[at : at + 16])
    parser.finish()
    # Linear work takes a tenth of this; quadratic work takes minutes.
    assert time.process_time() - began < 5
