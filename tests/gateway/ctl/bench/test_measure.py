import pytest

from gateway.ctl.bench.closed_loop import percentile, summarize_ms, table


def test_a_percentile_is_always_one_of_the_values() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, percent) for percent in (0, 20, 50, 90, 99, 100)] == [1, 1, 3, 5, 5, 5]


def test_p99_of_a_hundred_values_leaves_out_only_the_largest() -> None:
    assert percentile([float(value) for value in range(1, 101)], 99) == 99


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_summary_is_in_milliseconds_and_empty_ones_are_zero() -> None:
    summary = summarize_ms([0.001, 0.002, 0.006])
    assert (summary.count, summary.mean, summary.p50, summary.max) == (3, 3.0, 2.0, 6.0)
    assert summarize_ms([]).count == summarize_ms([]).p99 == 0


def test_table_columns_line_up() -> None:
    lines = table(("name", "n"), [("a", "1"), ("long name", "1000")]).splitlines()
    assert lines == ["name          n", "a             1", "long name  1000"]
