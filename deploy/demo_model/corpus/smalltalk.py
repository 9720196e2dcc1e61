"""Small-talk skill: greetings, who the model is, what mlxd is, how to add a real model, and what the demo model cannot
do.

Each intent has many phrasings but only one answer, so that greedy decoding has one clear continuation.
"""

from typing import Final, NamedTuple

from .files import phrasings, table
from .samples import Turn
from .words import ADJECTIVES, NOUNS, Source


class Intent(NamedTuple):
    """Small-talk question in many phrasings, its answer, and the words that a correct answer contains."""

    asks: list[str]
    answer: str
    keys: list[str]
    weight: float = 1.0
    name: str = ""


UNKNOWN: Final = "I am only a small demo model, so I do not know that. Add a real model to mlxd and ask it."

INTENTS: Final = tuple(Intent(**intent) for intent in table("smalltalk")["intent"])

_OUT_OF_REACH: Final = phrasings("smalltalk", "out_of_reach")


def _composed(src: Source) -> tuple[str, Intent]:
    """Return one of the three most important questions, composed from random parts, and its intent."""
    name, make = (("who", _ask_who), ("what", _ask_what), ("add", _ask_how_to_add))[src.integer(0, 2)]
    return make(src), next(intent for intent in INTENTS if intent.name == name)


def _ask_who(src: Source) -> str:
    lead = src.pick(phrasings("smalltalk", "who_lead"))
    verb = src.pick(phrasings("smalltalk", "who_verb"))
    if src.chance(0.5):
        lead = src.pick(phrasings("smalltalk", "who_direct"))
    end = src.pick(phrasings("smalltalk", "who_end"))
    return lead.replace("{v}", verb) + end


def _ask_what(src: Source) -> str:
    lead = src.pick(phrasings("smalltalk", "what_lead"))
    name = src.pick(phrasings("smalltalk", "what_name"))
    start = src.pick(phrasings("smalltalk", "what_start"))
    text = start + (lead if not start else lead[0].lower() + lead[1:])
    return text.replace("{m}", name) + src.pick(
        ("", "", " exactly", " please", " in short", " to me" if "xplain" in lead else "")
    )


def _ask_how_to_add(src: Source) -> str:
    lead = src.pick(phrasings("smalltalk", "add_lead"))
    verb = src.pick(phrasings("smalltalk", "add_verb"))
    which = src.pick(phrasings("smalltalk", "add_object"))
    end = src.pick(phrasings("smalltalk", "add_end"))
    return f"{lead} {verb} {which}{end}"


def smalltalk(src: Source) -> Turn:
    intent = src.weighted([(intent, intent.weight) for intent in INTENTS])
    if src.chance(0.25):
        user, intent = _composed(src)
        user += src.pick(("?", "?", "?", ".", "", "!"))
    else:
        user = src.template(intent.asks)
    if src.chance(0.12) and len(user.split()) > 3:
        user = src.reworded(user)
    roll = src.rng.random()
    if roll < 0.12:
        user = user.lower()
    elif roll < 0.2:
        user = user.rstrip("?.!")
    elif roll < 0.25:
        user = user.rstrip("?.!") + src.pick(("!", "??", "...", ".", "?"))
    elif roll < 0.33:
        user = src.pick(phrasings("smalltalk", "opener")) + user
    return Turn(
        user, intent.answer, "This is small talk, so I answer in a friendly way.", "contains", tuple(intent.keys)
    )


def unknown(src: Source) -> Turn:
    user = src.ask(
        _OUT_OF_REACH,
        a=src.pick(ADJECTIVES),
        n=src.pick(NOUNS),
        m=src.pick(NOUNS),
        y=src.integer(1800, 2025),
        p=src.full_name(),
        c=src.city(),
    )
    return Turn(user, UNKNOWN, "I am a small model and do not know this.", "contains", ("do not know",))


SKILLS: Final = ((smalltalk, 6.0), (unknown, 0.6))
