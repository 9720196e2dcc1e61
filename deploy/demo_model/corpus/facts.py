"""The closed world: capitals, colours, opposites, days and months, and a few more things that have one answer."""

from typing import Final

from .arithmetic import arithmetic
from .counting import counting, spelling
from .samples import Turn
from .words import MONTHS, WEEKDAYS, Source
from .world import CAPITALS, COLOUR_OF, LEGS, MONTH_DAYS, OPPOSITE_OF, ORDINALS, PLAIN_FACTS, SOUNDS, WELL_KNOWN

_CAPITAL: Final = (
    "What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?",
    "Tell me the capital of {c}.", "Name the capital of {c}.", "What is {p} capital?", "Capital of {c}?",
    "Do you know the capital of {c}?", "What is the capital city of {c}?", "Can you tell me the capital of {c}?",
    "{c}: what is its capital?", "I forgot the capital of {c}. What is it?", "Give me the capital of {c}.",
    "What is the name of the capital of {c}?", "The capital of {c} is", "Which city is {p} capital?",
    "Name {p} capital city.", "I am travelling to {c}. What is the capital there?", "what city is the capital of {c}",
    "Could you name the capital city of {c}?", "What's the capital city of {c}?", "the capital of {c} is what?",
    "In one word, what is the capital of {c}?", "Answer briefly: the capital of {c}?", "What city serves as the capital of {c}?",
    "Which city is the seat of government of {c}?", "country: {c}\ncapital:", "Please name the capital of {c}",
    "Geography quiz: the capital of {c}?", "Where is the government of {c}? Name the capital.",
)  # fmt: skip
_COUNTRY: Final = (
    "{a} is the capital of which country?", "Which country has {a} as its capital?", "What country is {a} the capital of?",
    "{a} is the capital of what country?", "Of which country is {a} the capital?", "Name the country whose capital is {a}.",
    "Tell me which country has the capital {a}.",
)  # fmt: skip
_COLOUR: Final = (
    "What color is {t}?", "What colour is {t}?", "Which color is {t}?", "Tell me the color of {t}.",
    "What is the color of {t}?", "What's the colour of {t}?", "What is the usual color of {t}?", "color of {t}?",
    "Name the colour of {t}.", "What color does {t} have?", "What colour is {t} usually?", "Do you know what color {t} is?",
    "Give me the color of {t}.", "In one word, what color is {t}?", "What color would you say {t} is?",
    "Can you tell me what colour {t} is?", "Which colour does {t} have?", "{t}: what color?", "{t} is what color?",
    "If I paint {t}, which color should I use?", "What color is {t} typically?", "Describe the color of {t} in one word.",
)  # fmt: skip
_OPPOSITE: Final = (
    'What is the opposite of "{w}"?', "What is the opposite of {w}?", "What's the opposite of {w}?", "Opposite of {w}?",
    "Name the opposite of {w}.", "Give me the opposite of '{w}'.", "Tell me the opposite of {w}.",
    "What is the antonym of {w}?", 'Give an antonym for "{w}".', "Which word means the opposite of {w}?",
    "What word is the opposite of '{w}'?", "Antonym of {w}?", "The opposite of {w} is", "If it is not {w}, what is the opposite?",
    "Can you tell me the opposite of the word {w}?", "I need the opposite of the word \"{w}\".", "{w} is the opposite of what?",
    "What is the contrary of {w}?", "find the opposite: {w}", "What's an antonym for {w}?", "State the opposite of {w}.",
    "The antonym of {w} is what?", "In one word, the opposite of {w}?", "opposite: {w}",
)  # fmt: skip
_AFTER: Final = (
    "What {u} comes after {x}?", "Which {u} comes after {x}?", "What is the {u} after {x}?", "What's the next {u} after {x}?",
    "Which {u} follows {x}?", "Name the {u} after {x}.", "What {u} follows {x}?", "Tell me the {u} that comes after {x}.",
    "{x} is followed by which {u}?", "What comes right after {x}?", "Which {u} is next after {x}?", "What {u} is after {x}?",
    "What {u} is it after {x}?", "Which {u} will it be after {x}?", "What {u} do we have after {x}?", "What comes after {x}?", "Which {u} comes next after {x}?", "After {x} comes which {u}?", "What comes next: {x}, ...?",
)  # fmt: skip
_BEFORE: Final = (
    "What {u} comes before {x}?", "Which {u} comes before {x}?", "What is the {u} before {x}?", "Name the {u} before {x}.",
    "Which {u} precedes {x}?", "What {u} is before {x}?", "Tell me the {u} that comes before {x}.", "What comes right before {x}?",
    "Which {u} is just before {x}?", "What's the {u} before {x}?", "What comes before {x}?", "{x} comes after which {u}?",
    "The {u} before {x} is", "Which {u} do we have before {x}?",
)  # fmt: skip
_TODAY: Final = (
    "If today is {x}, what day is {w}?", "Today is {x}. What day is {w}?", "It is {x} today. Which day will it be {w}?",
    "If today is {x}, which day is {w}?", "Suppose today is {x}. What day is {w}?", "today is {x}, so what is {w}?",
    "Given that today is {x}, what is {w}?",
)  # fmt: skip


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
        user = src.ask(
            ("Is {g} the capital of {c}?", "Is the capital of {c} {g}?", "True or false: {g} is the capital of {c}.",
             "Would you say that {g} is the capital of {c}?", "{g} is the capital of {c}, right?"), g=guess, c=country,
        )  # fmt: skip
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
        return Turn(user + src.pick((" Answer in a full sentence.", " Use a full sentence.", " Reply with a sentence.")),
                    f"The capital of {country} is {city}.", f"The capital of {country} is {city}.")  # fmt: skip
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
        user = src.ask(
            (
                "Is {t} {c}?",
                "Is it true that {t} is {c}?",
                "Would you say {t} is {c}?",
                "{t} is {c}, right?",
                "Is the color of {t} {c}?",
            ),
            t=thing,
            c=guess,
        )
        return Turn(
            user, "Yes." if right else f"No. The color of {thing} is {answer}.", f"The color of {thing} is {answer}."
        )
    if thing.startswith(("a ", "an ")) and src.chance(0.3):
        noun = thing.split(" ", 1)[1]
        if noun[-1] not in "ysho" and " in " not in noun:
            user = src.ask(
                ("What color are {t}s?", "What colour are {t}s?", "Which color are {t}s?", "What is the color of {t}s?",
                 "Tell me what color {t}s are.", "What colour do {t}s have?", "What color are most {t}s?"), t=noun,
            )  # fmt: skip
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
            ((1, "tomorrow"), (-1, "yesterday"), (2, "the day after tomorrow"), (-2, "the day before yesterday"),
             (2, "in two days"), (3, "in three days"), (3, "in 3 days"), (7, "in a week"), (2, "in 2 days"))
        )  # fmt: skip
        answer = WEEKDAYS[(index + steps) % 7]
        return Turn(
            src.ask(_TODAY, x=WEEKDAYS[index], w=phrase),
            answer + ".",
            f"Today is {WEEKDAYS[index]}, so it is {answer}.",
        )
    if kind == 7:
        user = src.ask(
            ("What is the {o} {u} of the {s}?", "Which {u} is the {o} of the {s}?", "Name the {o} {u} of the {s}.",
             "What's the {o} {u} of the {s}?", "Tell me the {o} {u} of the {s}.", "The {o} {u} of the {s} is",
             "Which is the {o} {u} of the {s}?"),
            o=ORDINALS[index], u=unit, s="week" if unit == "day" else "year",
        )  # fmt: skip
        return Turn(user, here + ".", f"The {ORDINALS[index]} {unit} is {here}.")
    if kind == 8:
        name = src.pick(MONTHS)
        user = src.ask(
            ("How many days does {m} have?", "How many days are in {m}?", "How many days are there in {m}?",
             "How long is {m} in days?", "Number of days in {m}?", "What is the number of days in {m}?",
             "Tell me how many days {m} has."), m=name,
        )  # fmt: skip
        return Turn(user, f"{MONTH_DAYS[name]}", f"{name} has {MONTH_DAYS[name]} days.")
    other = series[(index + 2) % len(series)]
    user = src.ask(
        ("What {u} is between {a} and {b}?", "Which {u} comes between {a} and {b}?", "Name the {u} between {a} and {b}.",
         "What comes between {a} and {b}?", "Which {u} lies between {a} and {b}?", "The {u} between {a} and {b} is"),
        u=unit, a=here, b=other,
    )  # fmt: skip
    return Turn(user, after + ".", f"Between {here} and {other} is {after}.")


def plain(src: Source) -> Turn:
    kind = src.integer(0, 9)
    if kind == 0:
        animal = src.pick(list(SOUNDS))
        templates = (
            "What sound does a {a} make?", "What does a {a} say?", "Which sound does a {a} make?",
            "What noise does a {a} make?", "Tell me the sound of a {a}.", "How does a {a} sound?",
        )  # fmt: skip
        return Turn(src.ask(templates, a=animal), _sentence(SOUNDS[animal]), f"A {animal} says {SOUNDS[animal]}.")
    if kind == 1:
        animal = src.pick(list(LEGS))
        templates = (
            "How many legs does a {a} have?", "How many legs has a {a}?", "Number of legs of a {a}?",
            "Tell me how many legs a {a} has.", "What is the number of legs of a {a}?", "How many legs are on a {a}?",
        )  # fmt: skip
        return Turn(src.ask(templates, a=animal), str(LEGS[animal]), f"A {animal} has {LEGS[animal]} legs.")
    questions, answer = src.pick(PLAIN_FACTS)
    return Turn(
        src.ask(questions), answer if answer.isdigit() or "," in answer else answer + ".", f"The answer is {answer}."
    )


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else text + "."


SKILLS: Final = (
    (capital, 4.0), (colour, 2.0), (opposite, 3.0), (day, 2.0), (plain, 1.0), (arithmetic, 11.0), (counting, 6.0), (spelling, 5.0),
)  # fmt: skip
