"""Recorded outputs of every family mean what they should, however they are split."""

import random

import pytest

from protocol.from_worker import DeltaKind
from tests.support.scale import scaled
from tests.worker.output.parsers.replay import (
    Case,
    calls_of,
    check_shape,
    load_cases,
    random_cuts,
    replay,
    text_of,
)
from worker.output.parsers.families import FAMILIES

CASES = load_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.why}")


@each_case
def test_output_means_what_is_written_down(case: Case) -> None:
    events, malformed = replay(case)
    check_shape(events, malformed)
    assert text_of(events, DeltaKind.TEXT) == case.content
    assert text_of(events, DeltaKind.REASONING) == case.reasoning
    calls = calls_of(events)
    assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in case.calls]
    assert all(want.id in ("", got.id) for got, want in zip(calls, case.calls, strict=True))
    assert malformed == case.malformed


@each_case
def test_no_split_changes_the_events(case: Case) -> None:
    whole = replay(case)
    rng = random.Random(case.raw)
    assert replay(case, range(1, len(case.raw))) == whole
    for at in range(1, len(case.raw)):
        assert replay(case, [at]) == whole, f"cut at {at}"
    for _ in range(scaled(40, 10)):
        cuts = random_cuts(case.raw, rng)
        assert replay(case, cuts) == whole, f"cut at {cuts}"


def test_every_family_has_a_case() -> None:
    plain = {"none", "think", "holo2", "spark", "ling3", "step3p5", "nemotron_v3", "granite_thinking", "apriel"}
    assert set(FAMILIES) - {case.family for case in CASES} <= plain
