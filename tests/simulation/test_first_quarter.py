from tests.simulation.quarter import play_quarter


def test_every_invariant_holds_in_the_first_quarter_of_the_seeds() -> None:
    play_quarter(0)
