import os

from benchmarks.viewers import Turn, as_text, precise_cpu_s


def test_the_ratio_is_the_median_of_pairs_of_turns() -> None:
    turns = [Turn(0, 100, 10.0, 0), Turn(10, 100, 11.0, 2048), Turn(10, 100, 12.0, 2048), Turn(0, 100, 10.0, 0)]

    assert as_text(turns, 64, 10).splitlines()[-1] == (
        "median 10.00 without, 11.50 with 10; with ÷ without 1.150 (pairs 1.100 to 1.200)"
    )


def test_cpu_time_of_a_process_grows_as_it_works() -> None:
    before = precise_cpu_s(os.getpid())
    sum(range(2_000_000))
    assert precise_cpu_s(os.getpid()) > before
