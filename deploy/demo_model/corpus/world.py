"""Facts of the closed world, from `tables/world.toml`: capitals, colours, opposites, and questions with one answer."""

from typing import Final

from .files import table, word_list
from .words import MONTHS

_WORLD: Final = table("world")
CAPITALS: Final[dict[str, str]] = _WORLD["capitals"]
WELL_KNOWN: Final = word_list("well_known_countries")
COLOUR_OF: Final[dict[str, str]] = _WORLD["colours"]
OPPOSITES: Final[list[tuple[str, str]]] = [(left, right) for left, right in _WORLD["opposites"]]
# Each pair is in the table in both directions, unless a word would get two opposites.
OPPOSITE_OF: Final[dict[str, str]] = {}
for _left, _right in OPPOSITES:
    OPPOSITE_OF.setdefault(_left, _right)
for _left, _right in OPPOSITES:
    OPPOSITE_OF.setdefault(_right, _left)
OPPOSITE_OF.update(
    {
        "long": "short",
        "short": "tall",
        "closed": "open",
        "old": "new",
        "young": "old",
        "heavy": "light",
        "light": "dark",
        "lose": "win",
        "find": "lose",
        "little": "big",
        "down": "up",
        "difficult": "easy",
    }
)
SOUNDS: Final[dict[str, str]] = _WORLD["sounds"]
LEGS: Final[dict[str, int]] = _WORLD["legs"]
PLAIN_FACTS: Final[tuple[tuple[list[str], str], ...]] = tuple((fact["asks"], fact["answer"]) for fact in _WORLD["fact"])
MONTH_DAYS: Final = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
ORDINALS: Final = word_list("ordinals")
