"""The prefix benchmark's arithmetic."""

from benchmarks.prefix import Prefix, as_table, measure_look_up


def test_a_look_up_finds_the_half_that_is_known() -> None:
    measured = measure_look_up(2000)
    assert measured.tokens == 2000
    assert measured.mlxd_s > 0
    assert measured.mlx_lm_s > 0


def test_the_table_shows_fractions_of_cold() -> None:
    result = Prefix("mlxd", 1024, 2.0, 0.02, None, 3.0, 4, 2.5, (1023, 0, 1023), True)
    row = " ".join(as_table([result]).splitlines()[1].split())
    assert row == "mlxd 1024 2.00 0.020 1/100 - - 3.000 1.50 1023/0/1023 2.50 1.25 yes"
