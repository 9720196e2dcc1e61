"""Choice of the daemon that serves a request: by what it would cost there, and staying where the conversation is warm.

The cost of a place is the time to the first token: its queue, a load if the model is not loaded, and the part of the
prompt that it would have to process. A conversation moves only where that gains more than its own prefill costs:
under overload, moving for less makes every place compute every conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Reason = Literal["only", "affinity", "cost"]

# Prefill of a place that has not measured its own, where no other has either: tokens a second.
UNKNOWN_RATE: Final = 500.0
# A conversation stays where it is warm for a gain of less.
GAIN_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class CandidatePlace:
    """A daemon that has the model. `name` is the peer's, empty for this daemon; `rate` is its prefill's, 0 if unknown.

    `load_s` is 0 where the model is loaded. `warm` are tokens of this prompt that it has probably cached.
    """

    name: str
    wait_s: float = 0.0
    rate: float = 0.0
    load_s: float = 0.0
    warm: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The chosen place, its cost in seconds, and why it was chosen."""

    place: CandidatePlace
    cost_s: float
    reason: Reason


def choose(places: Sequence[CandidatePlace], tokens: float) -> PlacementChoice:
    """The place for a prompt of about so many tokens; of equal ones the first. There is at least one."""
    usual = usual_rate(places)
    costs = {place.name: cost_s(place, tokens, usual) for place in places}
    if len(places) == 1:
        return PlacementChoice(places[0], costs[places[0].name], "only")
    best = min(places, key=lambda place: costs[place.name])
    home = max(places, key=lambda place: place.warm)
    if home.warm > 0 and home is not best:
        gain = costs[home.name] - costs[best.name]
        if gain <= max(GAIN_S, _prefill_s(best, tokens, usual)):
            return PlacementChoice(home, costs[home.name], "affinity")
    return PlacementChoice(best, costs[best.name], "affinity" if best.warm > 0 and best is home else "cost")


def usual_rate(places: Sequence[CandidatePlace]) -> float:
    """The rate of a place that has not measured its own: the mean of the others."""
    known = [place.rate for place in places if place.rate > 0]
    return sum(known) / len(known) if known else UNKNOWN_RATE


def cost_s(place: CandidatePlace, tokens: float, usual: float) -> float:
    """Seconds to the first token of a prompt at a place; `usual` is the rate of one that has not measured its own."""
    return place.wait_s + place.load_s + _prefill_s(place, tokens, usual)


def _prefill_s(place: CandidatePlace, tokens: float, usual: float) -> float:
    return max(0.0, tokens - place.warm) / (place.rate or usual)
