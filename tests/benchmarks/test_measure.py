import pytest

from benchmarks.measure import spread


def test_spread_is_relative_to_the_median() -> None:
    assert spread([90.0, 110.0, 100.0]) == pytest.approx(0.2)
