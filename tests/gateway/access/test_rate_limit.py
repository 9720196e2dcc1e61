import re
from dataclasses import dataclass

import pytest

from gateway.access.key import KeyLimits
from gateway.access.rate_limit import DEBT_MAX_S, EXPECTED_COMPLETION, Meter, TokenBucket
from gateway.errors import BadRequest, RateLimited
from gateway.telemetry.metrics import KeyMetrics


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, **limits: int) -> tuple[Meter, KeyMetrics]:
    numbers = KeyMetrics()
    return Meter("k", KeyLimits(**limits), numbers, clock), numbers


def headers(of: Meter) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in of.openai_headers()}


def test_a_bucket_holds_a_minute_and_refills_evenly() -> None:
    bucket = TokenBucket(60, now=0)
    bucket.take(60, 0)

    assert bucket.wait_s(1, 0) == 1
    assert bucket.wait_s(10, 0.5) == 9.5
    assert bucket.wait_s(10, 10) == 0
    assert bucket.level(3600) == 60
    assert bucket.full_in_s(3600) == 0


def test_what_is_more_than_a_bucket_holds_needs_a_full_one_and_leaves_a_debt() -> None:
    bucket = TokenBucket(60, now=0)

    assert bucket.wait_s(1000, 0) == 0
    bucket.take(120, 0)
    assert bucket.level(0) == -60
    assert bucket.wait_s(1, 0) == 61


def test_requests_a_minute() -> None:
    clock = Clock()
    one, numbers = meter(clock, rpm=2)
    one.request()
    one.request()

    with pytest.raises(RateLimited) as caught:
        one.request()
    assert caught.value.status == 429
    assert caught.value.type == "requests"
    assert caught.value.retry_after_s == 30
    assert numbers.rejections == {"requests": 1}

    clock.now += 29.9
    with pytest.raises(RateLimited):
        one.request()
    clock.now += 0.1
    one.request()


def test_in_the_long_run_no_more_than_the_limit_gets_through_however_it_is_asked() -> None:
    clock = Clock()
    one, _ = meter(clock, rpm=30)
    passed = 0
    for _ in range(100_000):
        clock.now += 0.013
        try:
            one.request()
        except RateLimited:
            continue
        passed += 1

    minutes = 100_000 * 0.013 / 60
    assert 30 * minutes <= passed <= 30 * (minutes + 1)


def test_tokens_are_reserved_by_estimate_and_settled_by_use() -> None:
    clock = Clock()
    one, numbers = meter(clock, tpm=1000)

    with one.hold(400) as charge:
        assert headers(one)["x-ratelimit-remaining-tokens"] == "600"
        charge.prompt, charge.completion = 100, 50
    assert headers(one)["x-ratelimit-remaining-tokens"] == "850"
    assert (numbers.prompt_tokens, numbers.generation_tokens) == (100, 50)


def test_who_used_more_than_was_estimated_waits_until_it_is_paid_off() -> None:
    clock = Clock()
    one, numbers = meter(clock, tpm=600)
    with one.hold(10) as charge:
        charge.completion = 1200

    with pytest.raises(RateLimited) as caught, one.hold(10):
        pass
    assert caught.value.type == "tokens"
    assert caught.value.retry_after_s == 61
    assert numbers.rejections == {"tokens": 1}
    assert headers(one)["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 61
    with one.hold(10):
        pass


@pytest.mark.parametrize("used", [10**6, 10**19, 10**30])
def test_a_debt_is_no_more_than_a_day_refills_and_can_be_told(used: int) -> None:
    clock = Clock()
    one, _ = meter(clock, tpm=60)
    with one.hold(10) as charge:
        charge.completion = used
    assert one.missing() == {"tokens": 60 + DEBT_MAX_S}
    assert headers(one)["x-ratelimit-reset-tokens"] == "1440m0s"
    assert len(one.anthropic_headers()) == 3
    with pytest.raises(RateLimited) as refused, one.hold(10):
        pass
    assert refused.value.retry_after_s == DEBT_MAX_S
    clock.now += DEBT_MAX_S + 60
    with one.hold(10):
        pass


def test_a_debt_beyond_a_day_that_was_kept_is_cut() -> None:
    one, _ = meter(Clock(), tpm=60)
    one.restore({"tokens": 1.8446744073709308e19}, 5.0)
    assert one.missing() == {"tokens": 60 + DEBT_MAX_S}


def test_a_reservation_beyond_a_day_can_be_told() -> None:
    one, _ = meter(Clock(), tpm=1)
    with one.hold(1e15):
        assert len(one.anthropic_headers()) == 3
    assert headers(one)["x-ratelimit-remaining-tokens"] == "1"


def test_reserved_tokens_come_back_when_a_request_fails() -> None:
    one, numbers = meter(Clock(), tpm=100)

    with pytest.raises(RuntimeError), one.hold(100):
        raise RuntimeError
    assert headers(one)["x-ratelimit-remaining-tokens"] == "100"
    assert numbers.running == 0


def test_the_expected_completion_is_learned_and_never_more_than_is_asked_for() -> None:
    one, _ = meter(Clock(), tpm=10**9)
    assert one.expected(None) == EXPECTED_COMPLETION
    assert one.expected(7) == 7
    for _ in range(100):
        with one.hold(1) as charge:
            charge.completion = 2000
    assert 1900 < one.expected(32_000) <= 2000


def test_concurrent_requests() -> None:
    one, numbers = meter(Clock(), concurrency=2)

    with one.hold(1), one.hold(1):
        with pytest.raises(RateLimited) as caught, one.hold(1):
            pass
        assert caught.value.retry_after_s == 1
    assert numbers.rejections == {"concurrency": 1}
    with one.hold(1):
        assert numbers.running == 1


def test_a_request_counts_as_its_sequences() -> None:
    clock = Clock()
    one, numbers = meter(clock, rpm=10, concurrency=8)
    one.request()
    with one.hold(1, 6):
        assert (numbers.running, numbers.sequences) == (1, 6)
        assert headers(one)["x-ratelimit-remaining-requests"] == "4"
        with pytest.raises(RateLimited) as caught, one.hold(1, 3):
            pass
        assert caught.value.message == "Key 'k' has 6 sequences running, and may have 8."
        one.request()
        with one.hold(1, 2):
            pass
    one.request()
    with pytest.raises(RateLimited, match="10 requests per minute"), one.hold(1, 8):
        pass
    assert numbers.sequences == 0
    assert headers(one)["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize(
    ("limit", "text"), [("concurrency", "4 at once"), ("rpm", "4 in a minute"), ("max_sequences", "4 in one request")]
)
def test_more_sequences_than_the_key_can_ever_have_are_refused_at_once(limit: str, text: str) -> None:
    one, numbers = meter(Clock(), **{limit: 4})
    with pytest.raises(BadRequest, match=text), one.hold(1, 5):
        pass
    assert numbers.rejections == {"sequences": 1}
    with one.hold(1, 4):
        pass


def test_what_was_used_of_a_limit_counts_on_under_the_next_one() -> None:
    clock = Clock()
    one, _ = meter(clock, rpm=10, tpm=600)
    for _ in range(4):
        one.request()
    with one.hold(10) as charge:
        charge.completion = 1200
    one.limit(KeyLimits(rpm=6, tpm=60))

    assert headers(one)["x-ratelimit-remaining-requests"] == "2"
    with pytest.raises(RateLimited) as caught, one.hold(1):
        pass
    assert caught.value.retry_after_s == 1200 - 60 + 1


def test_a_tokenize_call_takes_a_tenth_of_its_tokens_and_one_without_an_answer_its_estimate() -> None:
    one, numbers = meter(Clock(), tpm=1000)
    with one.tokenize_call(4000) as charge:
        assert headers(one)["x-ratelimit-remaining-tokens"] == "600"
        charge.prompt = 2000
    assert headers(one)["x-ratelimit-remaining-tokens"] == "800"
    with pytest.raises(RuntimeError), one.tokenize_call(3000):
        raise RuntimeError
    assert headers(one)["x-ratelimit-remaining-tokens"] == "500"
    with pytest.raises(RateLimited, match="1000 tokens per minute"), one.tokenize_call(6000):
        pass
    assert numbers.prompt_tokens == 0


def test_without_limits_nothing_is_refused_or_told() -> None:
    one, numbers = meter(Clock())
    for _ in range(1000):
        one.request()
    with one.hold(10**9) as charge:
        charge.prompt = 5

    assert not one.is_limited
    assert headers(one) == {}
    assert numbers.prompt_tokens == 5


def test_a_limit_that_stays_keeps_what_was_used_of_it() -> None:
    clock = Clock()
    one, _ = meter(clock, rpm=2, tpm=10)
    one.request()
    one.limit(KeyLimits(rpm=2, tpm=20))

    assert headers(one)["x-ratelimit-remaining-requests"] == "1"
    assert headers(one)["x-ratelimit-remaining-tokens"] == "20"
    one.limit(KeyLimits())
    assert headers(one) == {}


def test_both_dialects_tell_the_same_in_their_own_words() -> None:
    clock = Clock()
    one, _ = meter(clock, rpm=6, tpm=600)
    one.request()
    with one.hold(300) as charge:
        charge.prompt = 300
    anthropic = {name.decode(): value.decode() for name, value in one.anthropic_headers()}

    assert headers(one) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "30s",
    }
    assert anthropic["anthropic-ratelimit-requests-limit"] == "6"
    assert anthropic["anthropic-ratelimit-requests-remaining"] == "5"
    assert anthropic["anthropic-ratelimit-tokens-limit"] == "600"
    assert anthropic["anthropic-ratelimit-tokens-remaining"] == "300"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", anthropic["anthropic-ratelimit-tokens-reset"])


def test_requests_of_batches_use_budgets_and_no_rates() -> None:
    limited, numbers = meter(Clock(), rpm=1, tpm=10, concurrency=1)
    with limited.hold_budget(1000.0), limited.hold_budget(1000.0) as charge, limited.hold(5.0):
        charge.prompt, charge.completion = 30, 40
        assert (numbers.sequences, numbers.running) == (1, 1)
    assert (numbers.prompt_tokens, numbers.generation_tokens) == (30, 40)
    assert not numbers.rejections
    assert headers(limited)["x-ratelimit-remaining-tokens"] == "10"
