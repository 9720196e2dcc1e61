from benchmarks.stall import gaps_between


def test_a_stall_that_reaches_beyond_the_window_counts_whole() -> None:
    assert gaps_between([0.0, 1.0, 9.0, 10.0], 2.0, 8.0) == [8.0]


def test_gaps_that_only_touch_the_window_from_outside_do_not_count() -> None:
    assert gaps_between([0.0, 1.0, 2.0, 3.0, 4.0], 1.0, 3.0) == [1.0, 1.0]
