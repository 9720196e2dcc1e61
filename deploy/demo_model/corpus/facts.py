"""Fact skills: capitals, colours, opposites, days, months, and other questions with exactly one answer."""

from typing import Final

from .arithmetic import arithmetic
from .counting import ORDINALS, counting, spelling
from .files import phrasings, table, word_list
from .samples import Turn
from .words import MONTHS, WEEKDAYS, Source

# Facts of the closed world.
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

_CAPITAL: Final = phrasings("facts", "capital")
_COUNTRY: Final = phrasings("facts", "country")
_COLOUR: Final = phrasings("facts", "colour")
_OPPOSITE: Final = phrasings("facts", "opposite")
_AFTER: Final = phrasings("facts", "after")
_BEFORE: Final = phrasings("facts", "before")
_TODAY: Final = phrasings("facts", "today")


def capital(src: Source) -> Turn:
    country = src.pick(WELL_KNOWN) if src.chance(0.35) else src.pick(list(CAPITALS))
    city = CAPITALS[country]
    if src.chance(0.12):
        country = next(c for c in CAPITALS if CAPITALS[c] == city)
        name = country.removeprefix("the ")
        return Turn(
            src.ask(_COUNTRY, a=city), _sentence(country), f"{city} is the capital of {country}.", "contains", (name,)
        )
    if src.chance(0.08):
        right = src.chance(0.5)
        guess = city if right else src.pick([c for c in CAPITALS.values() if c != city])
        user = src.ask(phrasings("facts", "is_capital"), g=guess, c=country)
        if user.lower().find("true or false") >= 0:
            answer = "True." if right else f"False. The capital of {country} is {city}."
        else:
            answer = "Yes." if right else f"No. The capital of {country} is {city}."
        return Turn(user, answer, f"The capital of {country} is {city}.")
    possessive = country + ("'" if country.endswith("s") else "'s")
    if src.chance(0.02):
        nowhere = src.coined(2, 3).capitalize()
        return Turn(
            src.ask(_CAPITAL, c=nowhere, p=nowhere + "'s"), "I do not know that country.", f"I do not know {nowhere}."
        )
    user = src.ask(_CAPITAL, c=country, p=possessive)
    if src.chance(0.06):
        return Turn(
            user + src.pick((" Answer in a full sentence.", " Use a full sentence.", " Reply with a sentence.")),
            f"The capital of {country} is {city}.",
            f"The capital of {country} is {city}.",
        )
    if country.startswith("the ") and src.chance(0.4):
        user = user.replace("the " + country[4:], country[4:])
    return Turn(user, _sentence(city), f"The user asks for the capital of {country}. It is {city}.")


def colour(src: Source) -> Turn:
    thing = src.pick(list(COLOUR_OF))
    shown = thing
    answer = COLOUR_OF[thing]
    user = src.ask(_COLOUR, t=shown)
    if src.chance(0.1):
        right = src.chance(0.5)
        guess = (
            answer
            if right
            else src.pick(
                [c for c in ("red", "green", "blue", "yellow", "black", "white", "pink", "orange") if c != answer]
            )
        )
        user = src.ask(phrasings("facts", "is_colour"), t=thing, c=guess)
        return Turn(
            user, "Yes." if right else f"No. The color of {thing} is {answer}.", f"The color of {thing} is {answer}."
        )
    if thing.startswith(("a ", "an ")) and src.chance(0.3):
        noun = thing.split(" ", 1)[1]
        if noun[-1] not in "ysho" and " in " not in noun:
            user = src.ask(phrasings("facts", "colour_of_many"), t=noun)
    return Turn(user, _sentence(answer), f"The color of {thing} is {answer}.")


def opposite(src: Source) -> Turn:
    word = src.pick(list(OPPOSITE_OF))
    shown = word.upper() if src.chance(0.03) else word.capitalize() if src.chance(0.08) else word
    answer = OPPOSITE_OF[word]
    return Turn(src.ask(_OPPOSITE, w=shown), _sentence(answer), f"The opposite of {word} is {answer}.")


def day(src: Source) -> Turn:
    kind = src.integer(0, 9)
    series, unit = (WEEKDAYS, "day") if src.chance(0.55) else (MONTHS, "month")
    index = src.integer(0, len(series) - 1)
    here, after, before = series[index], series[(index + 1) % len(series)], series[index - 1]
    shown = here.lower() if src.chance(0.1) else here
    if kind < 3:
        return Turn(src.ask(_AFTER, u=unit, x=shown), after + ".", f"After {here} comes {after}.")
    if kind < 6:
        return Turn(src.ask(_BEFORE, u=unit, x=shown), before + ".", f"Before {here} comes {before}.")
    if kind == 6:
        index = src.integer(0, 6)
        steps, phrase = src.pick(
            (
                (1, "tomorrow"),
                (-1, "yesterday"),
                (2, "the day after tomorrow"),
                (-2, "the day before yesterday"),
                (2, "in two days"),
                (3, "in three days"),
                (3, "in 3 days"),
                (7, "in a week"),
                (2, "in 2 days"),
            )
        )
        answer = WEEKDAYS[(index + steps) % 7]
        return Turn(
            src.ask(_TODAY, x=WEEKDAYS[index], w=phrase),
            answer + ".",
            f"Today is {WEEKDAYS[index]}, so it is {answer}.",
        )
    if kind == 7:
        user = src.ask(phrasings("facts", "nth"), o=ORDINALS[index], u=unit, s="week" if unit == "day" else "year")
        return Turn(user, here + ".", f"The {ORDINALS[index]} {unit} is {here}.")
    if kind == 8:
        name = src.pick(MONTHS)
        user = src.ask(phrasings("facts", "days_of_month"), m=name)
        return Turn(user, f"{MONTH_DAYS[name]}", f"{name} has {MONTH_DAYS[name]} days.")
    other = series[(index + 2) % len(series)]
    user = src.ask(phrasings("facts", "between"), u=unit, a=here, b=other)
    return Turn(user, after + ".", f"Between {here} and {other} is {after}.")


def plain(src: Source) -> Turn:
    kind = src.integer(0, 9)
    if kind == 0:
        animal = src.pick(list(SOUNDS))
        templates = phrasings("facts", "sound")
        return Turn(src.ask(templates, a=animal), _sentence(SOUNDS[animal]), f"A {animal} says {SOUNDS[animal]}.")
    if kind == 1:
        animal = src.pick(list(LEGS))
        templates = phrasings("facts", "legs")
        return Turn(src.ask(templates, a=animal), str(LEGS[animal]), f"A {animal} has {LEGS[animal]} legs.")
    questions, answer = src.pick(PLAIN_FACTS)
    return Turn(
        src.ask(questions), answer if answer.isdigit() or "," in answer else answer + ".", f"The answer is {answer}."
    )


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else text + "."


SKILLS: Final = (
    (capital, 4.0),
    (colour, 2.0),
    (opposite, 3.0),
    (day, 2.0),
    (plain, 1.0),
    (arithmetic, 11.0),
    (counting, 6.0),
    (spelling, 5.0),
)
