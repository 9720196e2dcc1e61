"""Whom a comparison with an earlier answer may find."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gateway.access.caller import Caller
from gateway.request.in_flight import RecentRequests
from gateway.request.opener import Runtime
from gateway.request.record import RequestRecord
from gateway.request.why_slow import Diagnosis


@dataclass
class Ring:
    """The part of a runtime that finds earlier requests."""

    recent: RecentRequests = field(default_factory=RecentRequests)


def record(name: str, key: str | None, answer_id: str = "", model: str = "m") -> RequestRecord:
    made = RequestRecord(name, "POST", "/v1/messages", caller=Caller(key=key), answer_id=answer_id, rids=(7,))
    made.model = model
    return made


@pytest.fixture
def ring() -> Ring:
    ring = Ring()
    ring.recent.add(record("first", "alice", "msg_1"))
    return ring


def diagnosis(ring: Ring, of: RequestRecord, answer_id: str) -> Diagnosis:
    return Diagnosis(cast(Runtime, cast(Any, ring)), of, answer_id)


def test_a_key_finds_its_own_answers_alone(ring: Ring) -> None:
    assert diagnosis(ring, record("second", "alice"), "msg_1").other is not None
    for key in ("bob", None):
        stranger = diagnosis(ring, record("second", key), "msg_1")
        assert stranger.other is None
        assert stranger.is_final


def test_an_answer_is_not_found_by_the_id_of_its_request(ring: Ring) -> None:
    assert diagnosis(ring, record("second", "alice"), "first").other is None


def test_another_model_needs_no_comparison(ring: Ring) -> None:
    other = diagnosis(ring, record("second", "alice", model="n"), "msg_1")
    assert other.is_other_model
    assert other.is_final
    assert not diagnosis(ring, record("second", "alice"), "msg_1").is_final


@pytest.mark.anyio
async def test_a_worker_that_came_later_does_not_know_the_earlier_prompt(ring: Ring) -> None:
    same = diagnosis(ring, record("second", "alice"), "msg_1")
    await same.run(8, epoch=3)
    assert same.is_final
    assert not same.is_compared
    assert same.difference is None
