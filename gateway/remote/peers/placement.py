"""Choice of the daemon that serves a request, by cost and by prefix-cache affinity.

The cost of a place is the time to the first token: the wait in its queue, a load of the model, and the prefill of the
prompt's uncached part. A conversation moves to another place only if this saves more time than its prefill at that
place takes. With a lower threshold, an overload would make every place process every conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Reason = Literal["only", "affinity", "cost"]

# Assumed prefill rate, in tokens per second, if no place has measured its own.
UNKNOWN_RATE: Final = 500.0
# A conversation leaves the place that has cached it only if this saves at least this much time.
GAIN_MIN_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class CandidatePlace:
    """A daemon that has the model. `name` is the peer's name, empty for this daemon.

    `rate` is its prefill rate in tokens per second, 0 if unknown. `load_s` is 0 if the model is loaded. `warm` is the
    number of tokens of this prompt that the daemon has probably cached.
    """

    name: str
    wait_s: float = 0.0
    rate: float = 0.0
    load_s: float = 0.0
    warm: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The chosen place, its cost in seconds, and the reason for the choice."""

    place: CandidatePlace
    cost_s: float
    reason: Reason


def choose(places: Sequence[CandidatePlace], tokens: float) -> PlacementChoice:
    """Choose the place for a prompt of about `tokens` tokens; the first of equal places. `places` must not be empty."""
    usual = usual_rate(places)
    costs = {place.name: cost_s(place, tokens, usual) for place in places}
    if len(places) == 1:
        return PlacementChoice(places[0], costs[places[0].name], "only")
    best = min(places, key=lambda place: costs[place.name])
    warmest = max(places, key=lambda place: place.warm)
    if warmest.warm > 0 and warmest is not best:
        gain = costs[warmest.name] - costs[best.name]
        if gain <= max(GAIN_MIN_S, _prefill_s(best, tokens, usual)):
            return PlacementChoice(warmest, costs[warmest.name], "affinity")
    return PlacementChoice(best, costs[best.name], "affinity" if best.warm > 0 and best is warmest else "cost")


def usual_rate(places: Sequence[CandidatePlace]) -> float:
    """Return the prefill rate to assume for a place that has not measured its own: the mean of the others, if any."""
    known = [place.rate for place in places if place.rate > 0]
    return sum(known) / len(known) if known else UNKNOWN_RATE


def cost_s(place: CandidatePlace, tokens: float, usual: float) -> float:
    """Return the seconds until a place generates the first token. `usual` is the prefill rate of a place without its
    own.
    """
    return place.wait_s + place.load_s + _prefill_s(place, tokens, usual)


def _prefill_s(place: CandidatePlace, tokens: float, usual: float) -> float:
    return max(0.0, tokens - place.warm) / (place.rate or usual)
