"""The sentences for a request's time, and their order."""

import pytest
from msgspec.structs import replace

from gateway.control_types import RequestTiming, SlowCause
from gateway.request.in_flight import RecentRequest, RecentRequests
from gateway.request.record import RequestRecord
from gateway.request.why_slow import reloaded, slow_causes
from gateway.telemetry.metrics import Metrics
from protocol.from_worker import Explained, MissCause, MissCode

QUICK = RequestTiming(total_ms=30.0, ttft_ms=10.0, prompt_tokens=100, cached_tokens=99, completion_tokens=2)


def name_of(rid: int) -> str:
    return f"request {rid}" if rid else "another request"


def causes(timing: RequestTiming, *misses: MissCause, waited_for: str = "") -> list[SlowCause]:
    return slow_causes(timing, Explained(1, 100, other=7, age_s=33.0, causes=misses), name_of, waited_for)


def test_a_quick_request_has_no_causes() -> None:
    assert causes(QUICK) == []


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"load_ms": 4100.0}, "load", "It waited 4.1 s for its model: it was not in memory and was loaded."),
        ({"queue_ms": 200.0}, "queue", "It waited 200 ms in the model's worker, for a place or the disk."),
        (
            {"paused_ms": 90_000.0, "preemptions": 2},
            "preemption",
            "It stood still for 2 min: it was preempted 2 times for other requests.",
        ),
        (
            {"paused_ms": 1500.0, "grammar_waits": 1},
            "grammar",
            "It stood still for 1.5 s: it waited once for the grammar of its format.",
        ),
        (
            {"rested_ms": 700.0},
            "throttled",
            "The worker rested 700 ms of the time, because the display is in use, or the machine is hot or on battery.",
        ),
        ({"resumes": 1}, "resumed", "Its worker was lost once, and another one went on with it."),
        ({"decode_ms": 2000.0}, "decode", "The answer was generated: 2 tokens in 2.0 s, 1 a second."),
        ({"prefill_ms": 500.0}, "prefill", "New text of the prompt was computed: 1 tokens in 500 ms, 2 a second."),
        (
            {"drafted_tokens": 40, "accepted_tokens": 4},
            "drafts",
            "Drafts saved little time: 4 of 40 drafted tokens were accepted.",
        ),
    ],
)
def test_each_wait_has_a_sentence(changed: dict[str, float], code: str, words: str) -> None:
    (cause,) = causes(replace(QUICK, **changed))
    assert (cause.code, cause.text) == (code, words)


def test_a_crash_is_told_apart_from_a_load() -> None:
    (cause,) = causes(replace(QUICK, load_ms=10.0), waited_for="backoff")
    assert cause.text == "It waited 10 ms for its model: its worker had crashed and was started again."


def test_an_unload_is_named_until_the_model_is_loaded_again() -> None:
    metrics = Metrics()
    metrics.model_evicted("m", "memory")
    evicted = metrics.model("m").newest_eviction
    (cause,) = causes(replace(QUICK, load_ms=10.0), waited_for=evicted)
    assert "another model needed the memory" in cause.text
    metrics.load_seconds("m", 1.0)
    assert metrics.model("m").newest_eviction == ""


def test_missed_tokens_share_the_time_of_the_prefill_and_the_worst_cause_is_first() -> None:
    timing = replace(QUICK, cached_tokens=20, prefill_ms=800.0, queue_ms=250.0)
    evicted = MissCause(MissCode.EVICTED, 50, 20, by=9, ago_s=12.0)
    found = causes(timing, evicted, MissCause(MissCode.MESSAGE, 10, 70, 3, "user", "a", "b"))
    assert [(cause.code, cause.ms, cause.tokens) for cause in found] == [
        ("evicted", 500.0, 50),
        ("queue", 250.0, 0),
        ("prefill", 200.0, 20),
        ("message_changed", 100.0, 10),
    ]
    assert found[0].text == (
        "The cached prefix was evicted 12.0 s before, because request 9 needed the memory; 50 tokens were computed "
        "again, in about 500 ms."
    )
    assert found[3].text.startswith(
        "The client has changed an earlier message: message 3 (user) is not the same as in request 7, 33.0 s before: "
        "“a” became “b”;"
    )


@pytest.mark.parametrize("code", list(MissCode))
def test_every_cause_of_a_miss_has_a_sentence(code: MissCode) -> None:
    timing = replace(QUICK, cached_tokens=0, prefill_ms=100.0)
    (cause,) = [each for each in causes(timing, MissCause(code, 50, 0, 2, "user", "x", "y")) if each.code == code]
    assert "{" not in cause.text
    assert not cause.text.startswith("Cause")
    assert cause.ms > 0


def test_a_cause_of_a_later_version_is_named_by_its_code() -> None:
    found = causes(replace(QUICK, cached_tokens=0, prefill_ms=100.0), MissCause("moon_phase", 50))
    assert found[0].text.startswith("Cause moon_phase")


def ended(name: str, answer_id: str, rid: int) -> RequestRecord:
    record = RequestRecord(name, "POST", "/v1/messages", answer_id=answer_id, rids=(rid,))
    record.model = "m"
    return record


def test_the_ring_finds_requests_by_both_ids_and_forgets_the_oldest() -> None:
    recent = RecentRequests(2)
    for number in range(1, 4):
        recent.add(ended(f"r{number}", f"msg_{number}", number))
    assert recent.find("r1") is None
    assert recent.find("") is None
    assert recent.find("msg_2") == recent.find("r2")
    newest = recent.of_rid(3)
    assert newest is not None
    assert newest.id == "r3"
    assert recent.before(newest) == recent.find("r2")


def test_new_text_is_cold_after_a_load() -> None:
    def request(name: str, at: float, epoch: int) -> RecentRequest:
        return RecentRequest(name, "", "m", None, "/", at, "stop", "", "", 5, epoch, QUICK)

    explained = reloaded(
        request("b", 100.0, 2), request("a", 40.0, 1), Explained(1, 100, causes=(MissCause(MissCode.NEW, 90),))
    )
    timing = replace(QUICK, cached_tokens=0, prefill_ms=100.0)
    cause = slow_causes(timing, explained, name_of)[0]
    assert cause.code == "reloaded"
    assert cause.text.startswith("The model was loaded again after request 5, 60.0 s before, and its cache in memory")
