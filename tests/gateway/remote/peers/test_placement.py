"""Choice of a place by cost, and of conversations by the hashes of their beginnings."""

from typing import Any

import msgspec
import pytest

from gateway.remote.peers.affinity import Affinity, Prefix, prefixes_of
from gateway.remote.peers.placement import CandidatePlace, choose


def test_the_shorter_queue_is_chosen_and_of_equal_ones_the_first() -> None:
    idle, busy = CandidatePlace("", rate=1000.0), CandidatePlace("b", wait_s=2.0, rate=1000.0)
    assert choose([idle, busy], 4000).place is idle
    assert choose([CandidatePlace("b"), CandidatePlace("c")], 4000).place.name == "b"
    assert choose([busy], 4000).reason == "only"


def test_a_model_that_is_not_loaded_costs_its_load() -> None:
    assert choose([CandidatePlace("", load_s=15.0), CandidatePlace("b", wait_s=3.0)], 100).place.name == "b"
    assert choose([CandidatePlace("", load_s=15.0), CandidatePlace("b", wait_s=30.0)], 100).place.name == ""


def test_a_faster_machine_is_worth_a_longer_queue() -> None:
    slow, fast = CandidatePlace("", rate=200.0), CandidatePlace("b", wait_s=1.0, rate=2000.0)
    assert choose([slow, fast], 4000).place is fast
    assert choose([slow, fast], 100).place is slow


def test_a_conversation_stays_where_it_is_warm_until_moving_gains_more_than_its_prefill() -> None:
    def chosen(wait_s: float) -> str:
        home = CandidatePlace("b", wait_s=wait_s, rate=1000.0, warm=3900.0)
        return choose([CandidatePlace("", rate=1000.0), home], 4000).place.name

    # Here all 4,000 tokens are computed: 4 s. Staying costs the queue and 0.1 s.
    assert chosen(0.0) == chosen(3.0) == chosen(7.0) == "b"
    assert chosen(9.0) == ""


def test_an_unknown_rate_is_taken_for_that_of_the_others() -> None:
    known, unknown = CandidatePlace("", wait_s=0.5, rate=1000.0), CandidatePlace("b")
    assert choose([known, unknown], 4000).cost_s == pytest.approx(4.0)  # type: ignore[misc]


def chat(*texts: str, tools: list[Any] | None = None) -> msgspec.Raw:
    messages = [{"role": "user", "content": text} for text in texts]
    return msgspec.Raw(msgspec.msgpack.encode([1, messages, tools or []]))


def test_turns_of_a_conversation_share_the_beginnings_of_their_prompts() -> None:
    first, second = prefixes_of(chat("a", "b"), "m", ""), prefixes_of(chat("a", "b", "c" * 400), "m", "")
    assert second[:2] == first
    assert second[2].tokens > first[1].tokens + 99


@pytest.mark.parametrize(
    "other",
    [
        prefixes_of(chat("x", "b"), "m", ""),
        prefixes_of(chat("a", "b"), "other", ""),
        prefixes_of(chat("a", "b"), "m", "salt"),
        prefixes_of(chat("a", "b", tools=[{"name": "f"}]), "m", ""),
    ],
    ids=["message", "model", "salt", "tools"],
)
def test_other_beginnings_models_salts_and_tools_share_nothing(other: list[Prefix]) -> None:
    own = {prefix.key for prefix in prefixes_of(chat("a", "b"), "m", "")}
    assert own.isdisjoint(prefix.key for prefix in other)


@pytest.mark.parametrize("count", [10, 20, 40_000, 80_000])
def test_longer_texts_and_lists_of_ids_begin_as_shorter_ones(count: int) -> None:
    def text(length: int) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode([2, "wort " * length]))

    def ids(length: int) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode([3, [7000 + at % 90 for at in range(length)]]))

    for make in (text, ids):
        short, long = prefixes_of(make(count), "m"), prefixes_of(make(count + 5000), "m")
        assert long[: len(short)] == short
        assert len(long) > len(short) or len(short) == len(prefixes_of(make(10**6), "m"))


def test_a_prompt_of_another_kind_has_no_beginnings() -> None:
    assert prefixes_of(msgspec.Raw(msgspec.msgpack.encode([99, "x"])), "m") == []


def test_the_place_of_the_longest_beginning_is_the_warmest_and_forgotten_in_time() -> None:
    now = 0.0
    affinity = Affinity(lambda: now)
    first, second = prefixes_of(chat("a"), "m"), prefixes_of(chat("a", "b"), "m")
    affinity.note(first, "b")
    affinity.note(second, "c")
    warm = affinity.warm(prefixes_of(chat("a", "b", "c"), "m"))
    assert warm["c"] > warm["b"] > 0
    affinity.forget("c")
    assert set(affinity.warm(second)) == {"b"}
    now = 4000.0
    assert affinity.warm(second) == {}
