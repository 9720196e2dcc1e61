"""Stop strings: the answer does not depend on how the text was cut, and nothing of a match is emitted."""

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.output.stops import StopScanner

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def scan(stops: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    """Text that a client reads, and whether the sequence was stopped."""
    scanner, emitted = StopScanner(stops), ""
    for part in parts:
        safe, is_stopped = scanner.feed(part)
        emitted += safe
        if is_stopped:
            return emitted, True
    return emitted + scanner.flush(), False


def reference(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """The match that is complete first ends the text; of those complete at once, the longest."""
    for end in range(len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(stop_lists, letters, st.lists(st.integers(0, 30), max_size=10))
@example(("abab", "ba"), "abab", [2, 3])
@example(("aab",), "aaab", [1, 2, 3])
def test_any_split_gives_the_answer_of_the_whole_text(stops: tuple[str, ...], text: str, places: list[int]) -> None:
    assert scan(stops, cut(text, places)) == scan(stops, [text]) == scan(stops, list(text)) == reference(stops, text)


@given(stop_lists, letters)
def test_no_stop_string_is_ever_inside_what_was_emitted(stops: tuple[str, ...], text: str) -> None:
    emitted, _ = scan(stops, list(text))
    assert not any(stop in emitted for stop in stops)


@given(stop_lists, letters)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(stops: tuple[str, ...], text: str) -> None:
    scanner, emitted, read = StopScanner(stops), "", ""
    for char in text:
        safe, is_stopped = scanner.feed(char)
        emitted, read = emitted + safe, read + char
        if is_stopped:
            return
        held = read[len(emitted) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_three_parts_is_never_emitted() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.feed("go S") == ("go ", False)
    assert scanner.feed("TO") == ("", False)
    assert scanner.feed("P on") == ("", True)


def test_a_beginning_that_leads_nowhere_is_given_back() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.feed("ST") == ("", False)
    assert scanner.feed("ONE") == ("STONE", False)


def test_the_end_of_the_sequence_releases_what_was_held() -> None:
    scanner = StopScanner(("STOP",))
    scanner.feed("a STO")
    assert scanner.flush() == "STO"
    assert scanner.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    assert scan((), ["a", "", "b"]) == ("ab", False)


def test_an_empty_stop_string_never_matches() -> None:
    assert scan(("",), ["abc"]) == ("abc", False)
    assert scan(("", "c"), ["abc"]) == ("ab", True)


@pytest.mark.parametrize("stop", ["é🙂", "\n\n", "\x00", "日本"])
def test_any_character_may_be_part_of_a_stop_string(stop: str) -> None:
    assert scan((stop,), [*f"head{stop}tail"]) == ("head", True)


def test_characters_are_read_once_however_long_the_stop_string_is() -> None:
    class Counting(str):
        """A text that counts how often its characters are looked at."""

        looks = 0

        def __getitem__(self, key: object) -> str:
            Counting.looks += 1
            return super().__getitem__(key)  # type: ignore[index]

    # The worst text for a scanner that starts over: every character continues a match that is never completed.
    stop = Counting("a" * 2000 + "b")
    scanner = StopScanner((stop,))
    built = Counting.looks
    size = 20_000
    emitted = "".join(scanner.feed("a")[0] for _ in range(size)) + scanner.flush()
    assert len(emitted) == size
    assert Counting.looks - built <= 4 * size


def test_the_sequences_of_a_request_share_what_is_made_of_a_stop_string() -> None:
    class Counting(str):
        """A text that counts how often its characters are looked at."""

        looks = 0

        def __getitem__(self, key: object) -> str:
            Counting.looks += 1
            return super().__getitem__(key)  # type: ignore[index]

    stop = Counting("ab" * 2000 + "c")
    StopScanner((stop,))
    once = Counting.looks
    for _ in range(103):
        StopScanner((stop,))
    assert Counting.looks <= once + 103


def test_random_texts_agree_with_the_reference_for_long_overlapping_stops() -> None:
    rng = random.Random(3)
    for _ in range(300):
        stops = tuple("".join(rng.choices("ab ", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 4)))
        text = "".join(rng.choices("ab ", k=60))
        assert scan(stops, cut(text, [rng.randrange(60) for _ in range(9)])) == reference(stops, text)
