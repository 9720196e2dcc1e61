import argparse

import pytest

from benchmarks.serve import bounds, numbers, parse_url
from gateway.ctl.bench.closed_loop import Target


def test_lengths_are_a_number_or_a_range() -> None:
    assert bounds("128") == (128, 128)
    assert bounds("64-256") == (64, 256)


@pytest.mark.parametrize("text", ["0", "9-3", "0-5"])
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bounds(text)


def test_concurrency_is_a_list_of_positive_numbers() -> None:
    assert numbers("1,4,16") == [1, 4, 16]
    with pytest.raises(argparse.ArgumentTypeError):
        numbers("4,0")


def test_targets_are_read_with_and_without_v1() -> None:
    assert parse_url("localhost:8484").prefix == parse_url("http://localhost:8484/v1/").prefix == ""
    assert parse_url("https://host/api/v1") == Target("host", 443, "/api", tls=True)
