"""Requests with fields that an older worker does not know, told before it ignores them."""

from typing import Any

import msgspec
import pytest

from protocol.minors import MINOR, SINCE, unknown_field, unknown_part
from protocol.prompts import (
    ChatPrompt,
    EmbedPrompt,
    Infill,
    Media,
    NextTurnPrompt,
    Prompt,
    ScorePrompt,
    TextPrompt,
    TokensPrompt,
)
from protocol.to_worker import Generate, Sampling
from tests.protocol import golden_frames

# Fields that a worker may ignore: order and speed alone depend on them, or they do nothing without one of `SINCE`.
IGNORABLE = frozenset(
    {
        "tenant",
        "left_out",
        "prompt_scored",
        "echo_scored",
        "most_drafted",
        "prediction",
        "xtc_threshold",
        "dry_base",
        "dry_allowed_length",
        "dry_window",
        "dry_breakers",
    }
)
OLD: dict[str, Any] = {"max_tokens": 5, "stop": ("x",), "tenant": "t", "prediction": "p", "most_drafted": 0}


def lengths(minor: int) -> dict[type[msgspec.Struct], int]:
    """Fields that each part of a request had, of the frames of that minor."""
    prompts: dict[int, type[msgspec.Struct]] = {1: ChatPrompt, 2: TextPrompt, 3: TokensPrompt}
    counted: dict[type[msgspec.Struct], int] = {}
    for frame in golden_frames.read(golden_frames.path(1, minor)).down:
        message = msgspec.msgpack.decode(frame)
        if message[0] == 2:
            counted |= {Generate: len(message) - 1, Sampling: len(message[3])}
            counted |= {struct: len(message[2]) - 1 for tag, struct in prompts.items() if tag == message[2][0]}
    return counted


def test_every_field_that_came_later_has_its_minor_or_may_be_ignored() -> None:
    known = lengths(0)
    assert len(known) == 5
    for struct, count in known.items():
        later = set(struct.__struct_fields__[count:])
        assert later == set(SINCE.get(struct, {})) | (later & IGNORABLE)
        assert all(0 < since <= MINOR for since in SINCE.get(struct, {}).values())


def test_every_ignorable_field_is_one_of_a_request() -> None:
    assert {*Generate.__struct_fields__, *Sampling.__struct_fields__} >= IGNORABLE


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Generate(1, TextPrompt("a", Infill("b")), Sampling()), "infill"),
        (Generate(1, ChatPrompt([], media=(Media("image", b"", b""),)), Sampling()), "media"),
        (Generate(1, TextPrompt("a"), Sampling(bad_words=("b",))), "bad_words"),
        (Generate(1, TextPrompt("a"), Sampling(), includes_stop=True), "includes_stop"),
        (Generate(1, TextPrompt("a"), Sampling(), top_logprobs=0, echo=True), "logprobs of the prompt"),
        (Generate(1, TextPrompt("a"), Sampling(), prompt_logprobs=0), "prompt_logprobs"),
        (Generate(1, TextPrompt("a"), Sampling(), prompt_ids=True), "prompt_ids"),
        (Generate(1, NextTurnPrompt(2), Sampling()), "prompts of next turns"),
        (Generate(1, TextPrompt("a"), Sampling(), top_logprobs=1), None),
        (Generate(1, TokensPrompt((1,)), Sampling(0.5, top_k=3, ignore_eos=True), **OLD), None),
    ],
)
def test_a_request_that_says_more_than_a_worker_knows_is_told_by_the_field(
    request_: Generate, field: str | None
) -> None:
    assert unknown_field(request_, 0) == field
    assert unknown_field(request_, MINOR) is None


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        (EmbedPrompt(("a",)), "prompts of models that read"),
        (ScorePrompt(("a",), ("b",)), "prompts of models that read"),
        (ChatPrompt([], media=(Media("image", b"", b""),)), "media"),
        (TextPrompt("a", Infill("b")), "infill"),
        (TextPrompt("a", adds_special=False), "adds_special"),
        (TextPrompt("a"), None),
        (TokensPrompt((1,)), None),
    ],
)
def test_a_question_that_a_worker_would_not_read_as_it_is_meant_is_told_by_its_part(
    prompt: Prompt, part: str | None
) -> None:
    assert unknown_part(prompt, 0) == part
    assert unknown_part(prompt, MINOR) is None
