"""Control tokens: where a tokenizer has markup as tokens of its own, these are markup and their characters are not."""

import random
import re

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import (
    Case,
    check_shape,
    load_cases,
    random_cuts,
    replay,
    some_cuts,
    text_of,
)
from worker.output.parsers.parser import make_parser
from worker.output.parsers.reader import Controls, is_markup

# What looks like a control token, in any family.
TOKEN = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<｜[^<>\s]+?｜>|</?(?:think|tool_call|tool_calls|TOOLCALL)>|\[/?[A-Z_]+\]"
)
CASES = load_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.why}")


def controls_of(case: Case) -> Controls:
    return Controls(dict.fromkeys(TOKEN.findall(case.raw), False))


@each_case
def test_tokens_are_read_like_the_text_that_they_stand_for(case: Case) -> None:
    written = [hit.start() for hit in TOKEN.finditer(case.raw)]
    whole = replay(case)
    assert replay(case, [], controls_of(case), written) == whole
    for at in some_cuts(case.raw):
        assert replay(case, [at], controls_of(case), written) == whole, f"cut at {at}"


@each_case
def test_no_split_changes_what_ordinary_tokens_mean(case: Case) -> None:
    rng = random.Random(case.raw)
    places = [hit.start() for hit in TOKEN.finditer(case.raw)]
    # With few tokens in it they are the same.
    ways = dict.fromkeys([(), tuple(places[::2]), tuple(rng.sample(places, len(places) // 2))])
    for written in ways:
        whole = replay(case, [], controls_of(case), written)
        check_shape(*whole)
        for at in some_cuts(case.raw):
            assert replay(case, [at], controls_of(case), written) == whole, f"cut at {at}"
        assert replay(case, random_cuts(case.raw, rng), controls_of(case), written) == whole


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("hermes", 'Say <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> or <think> or </think>.'),
        ("qwen3_coder", "<tool_call>\nbegins a call, </tool_call> ends it."),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
        ("mistral", "[THINK]no thought[/THINK] [TOOL_CALLS]f[ARGS]{}"),
        ("harmony", "The marker <|end|> ends a message, <|message|> begins it."),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
)
def test_characters_that_look_like_markup_are_text(family: str, raw: str) -> None:
    controls = Controls(dict.fromkeys(TOKEN.findall(raw), True))
    for size in (1, 3, len(raw)):
        parser = make_parser(family, start_in_reasoning=False, controls=controls)
        events = [event for at in range(0, len(raw), size) for event in parser.feed(raw[at : at + size])]
        events += parser.finish()
        assert {event.kind for event in events} == {DeltaKind.TEXT}
        assert text_of(events, DeltaKind.TEXT) == raw
        assert (parser.saw_tool_call, parser.malformed) == (False, 0)


def test_a_token_inside_of_an_argument_is_what_ends_it_and_its_characters_are_not() -> None:
    raw = '<|tool_call>call:f{s:<|"|>the mark <|"|> quotes<|"|>}<tool_call|>'
    tokens = ["<|tool_call>", '<|"|>', "<tool_call|>"]
    places = [hit.start() for hit in re.finditer("|".join(map(re.escape, tokens)), raw)]
    quoting = places[2]
    case = Case("", "gemma4", raw, "", "", [])
    events, _ = replay(case, [], Controls(dict.fromkeys(tokens, True)), [at for at in places if at != quoting])
    assert text_of(events, DeltaKind.TOOL_ARGS) == '{"s": "the mark <|\\"|> quotes"}'


def test_a_special_token_opens_reasoning_anywhere() -> None:
    raw = "So: <think>plan</think>Yes."
    case = Case("", "hermes", raw, "", "", [])
    written = [hit.start() for hit in TOKEN.finditer(raw)]
    for is_special, said in ((True, "So: Yes."), (False, raw)):
        events, _ = replay(case, [], Controls({"<think>": is_special, "</think>": is_special}), written)
        assert text_of(events, DeltaKind.TEXT) == said


@pytest.mark.parametrize(
    ("content", "is_special", "found"),
    [("<tool_call>", False, True), ("    ", False, False), ("\n\n", True, False), ("]~b]", True, True),
     ("｜DSML｜", False, True), ("<|", False, False), ("hello", False, False)],
)  # fmt: skip
def test_only_what_looks_like_markup_is_a_control(content: str, is_special: bool, found: bool) -> None:
    assert is_markup(content, is_special) is found
