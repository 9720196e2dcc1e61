import asyncio
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import ModelConfig
from gateway.errors import ApiError, BadRequest, Overloaded, Unavailable
from gateway.request.admission import Admission

MODEL = ModelConfig(name="m", path="m", max_running=2)


def queue_of(
    waiting_max: int,
    on_rejection: Callable[[str, str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Admission:
    """Queues with few places."""
    admission = Admission(on_rejection, clock)
    admission.waiting_max = waiting_max
    return admission


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    rejections: list[tuple[str, str]] = []
    admission = queue_of(1, lambda model, reason: rejections.append((model, reason)))

    with admission.lease(MODEL, 2), admission.lease(MODEL):
        with pytest.raises(Overloaded) as caught, admission.lease(MODEL):
            pass
        assert admission.inside("m") == 3

    assert caught.value.status == 429
    assert caught.value.retry_after_s >= 1
    assert rejections == [("m", "queue_full")]
    assert admission.inside("m") == 0


def test_other_limits_of_a_model_hold_from_the_next_request_on() -> None:
    admission = queue_of(1)
    narrow = ModelConfig(name="m", path="m", max_running=1)
    wide = ModelConfig(name="m", path="m", max_running=9)

    with admission.lease(MODEL), admission.lease(MODEL):
        with pytest.raises(Overloaded, match="2 of 2"), admission.lease(narrow):
            pass
        with admission.lease(wide):
            assert admission.inside("m") == 3


def test_one_models_queue_does_not_fill_anothers() -> None:
    admission = queue_of(1)
    other = ModelConfig(name="o", path="o", max_running=1)

    with admission.lease(MODEL, 3), admission.lease(other):
        pass


def test_a_request_that_can_never_fit_is_a_400() -> None:
    with pytest.raises(BadRequest), queue_of(1).lease(MODEL, 4):
        pass


def test_nothing_is_admitted_while_draining() -> None:
    admission = Admission()
    admission.is_draining = True

    with pytest.raises(Unavailable) as caught, admission.lease(MODEL):
        pass
    assert (caught.value.status, caught.value.code) == (503, "draining")
    assert caught.value.retry_after_s > 0


def test_retry_after_grows_with_how_long_requests_take_and_stays_in_bounds() -> None:
    now = 0.0
    admission = queue_of(1, clock=lambda: now)

    def rejected_after(seconds: float) -> float:
        nonlocal now
        with admission.lease(MODEL):
            now += seconds
        with admission.lease(MODEL, 3), pytest.raises(Overloaded) as caught, admission.lease(MODEL):
            pass
        return caught.value.retry_after_s

    assert rejected_after(0.1) == 1
    assert 1 < rejected_after(100) <= 60
    assert rejected_after(100_000) == 60


def test_one_key_may_have_its_share_of_a_queue_and_the_others_the_rest() -> None:
    rejections: list[str] = []
    admission = queue_of(8, lambda _, reason: rejections.append(reason))
    model = ModelConfig(name="m", path="m", max_running=2)
    with admission.lease(model, 5, "greedy", 50):
        with pytest.raises(Overloaded, match="5 of the 5 places in the queue of m") as caught:
            admission.lease(model, 1, "greedy", 50).__enter__()
        assert caught.value.retry_after_s >= 1
        with pytest.raises(BadRequest, match="for one key, takes at most 5"):
            admission.lease(model, 6, "other", 50).__enter__()
        with admission.lease(model, 5, "other", 50):
            assert admission.inside("m") == 10
    assert rejections == ["key_share", "too_many_sequences"]
    with admission.lease(model, 10, "alone", 100):
        pass
    with admission.lease(model, 5, "greedy", 50):
        pass
    assert admission.inside("m") == 0


def test_a_share_is_at_least_one_place() -> None:
    model = ModelConfig(name="m", path="m", max_running=1)
    with queue_of(0).lease(model, 1, "k", 1):
        pass


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.booleans()), max_size=12))
def test_no_lease_is_leaked_whatever_is_cancelled_or_raised(plan: list[tuple[int, int, bool, bool]]) -> None:
    admission = queue_of(1)
    most = 0

    async def request(sequences: int, turns: int, raises: bool) -> None:
        nonlocal most
        with admission.lease(MODEL, sequences):
            most = max(most, admission.inside("m"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if raises:
                raise RuntimeError("a request failed")

    async def run() -> None:
        tasks = [asyncio.create_task(request(sequences, turns, raises)) for sequences, turns, raises, _ in plan]
        await asyncio.sleep(0)
        for task, (_, _, _, cancelled) in zip(tasks, plan, strict=True):
            if cancelled:
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, ApiError | RuntimeError | asyncio.CancelledError)

    asyncio.run(run())
    assert admission.inside("m") == 0
    assert most <= 3
