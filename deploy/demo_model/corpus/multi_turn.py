"""Conversations whose last question needs a fact from up to six turns earlier."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from . import arithmetic, counting, facts, smalltalk, transforms
from .files import phrasings
from .samples import Sample, Turn
from .words import ANIMALS, FOODS, HOBBIES, JOBS, Source

Said = tuple[str, str, str]  # user's message, answer, reasoning


class Told(NamedTuple):
    """Fact that the user states: the message, the model's reply, later questions about the fact, their answer, its
    value."""

    says: str
    reply: str
    asks: tuple[str, ...]
    answer: str
    value: str


def _name(src: Source) -> Told:
    n = src.name()
    says = src.ask(phrasings("multi_turn", "name_told"), n=n)
    asks = phrasings("multi_turn", "name_asked")
    return Told(says, f"Nice to meet you, {n}!", asks, f"Your name is {n}.", n)


def _number(src: Source) -> Told:
    n = str(src.number())
    what = src.pick(phrasings("multi_turn", "numbers"))
    says = src.ask(phrasings("multi_turn", "number_told"), w=what, n=n)
    return Told(says, f"Got it, your {what} is {n}.", _asks_for(what), f"Your {what} is {n}.", n)


def _age(src: Source) -> Told:
    n = str(src.integer(6, 95))
    says = src.ask(phrasings("multi_turn", "age_told"), n=n)
    asks = phrasings("multi_turn", "age_asked")
    return Told(says, f"Got it, you are {n} years old.", asks, f"You are {n} years old.", n)


def _city(src: Source) -> Told:
    c = src.city()
    says = src.ask(phrasings("multi_turn", "city_told"), c=c)
    asks = phrasings("multi_turn", "city_asked")
    return Told(says, f"{c} sounds like a nice place.", asks, f"You live in {c}.", c)


def _job(src: Source) -> Told:
    j = src.pick(JOBS)
    a = "an" if j[0] in "aeiou" else "a"
    says = src.ask(phrasings("multi_turn", "job_told"), a=a, j=j)
    asks = phrasings("multi_turn", "job_asked")
    return Told(says, "That sounds like interesting work.", asks, f"You are {a} {j}.", j)


def _pet(src: Source) -> Told:
    animal, n = src.pick(ANIMALS), src.name()
    says = src.ask(phrasings("multi_turn", "pet_told"), a=animal, n=n)
    asks = (
        f"What is my {animal} called?",
        f"What is the name of my {animal}?",
        "What is my pet called?",
        f"What's my {animal}'s name?",
        f"Do you remember the name of my {animal}?",
        "What is my pet's name?",
        f"Tell me the name of my {animal}.",
        f"How is my {animal} called?",
        f"What did I call my {animal}?",
    )
    return Told(says, f"{n} is a lovely name for a {animal}.", asks, f"Your {animal} is called {n}.", n)


def _relative(src: Source) -> Told:
    who, n = (src.pick(phrasings("multi_turn", "relatives")), src.name())
    says = src.ask(phrasings("multi_turn", "relative_told"), w=who, n=n)
    asks = (
        f"What is my {who} called?",
        f"What is the name of my {who}?",
        f"What's my {who}'s name?",
        f"Who is my {who}?",
        f"Do you remember my {who}'s name?",
        f"Tell me the name of my {who}.",
        f"What is my {who}'s name?",
        f"How is my {who} called?",
    )
    return Told(says, f"Thank you for telling me about your {who}.", asks, f"Your {who} is called {n}.", n)


def _favourite(src: Source) -> Told:
    kind = src.integer(0, 9)
    if kind < 4:
        what, value = src.pick(("color", "colour")), src.colour()
    elif kind == 4:
        what, value = "food", src.pick(FOODS)
    elif kind == 5:
        what, value = "animal", src.pick(ANIMALS)
    elif kind == 6:
        what, value = "hobby", src.pick(HOBBIES)
    else:
        what, value = src.noun(), src.pick((src.word(), src.name(), src.city()))
    says = src.ask(phrasings("multi_turn", "favourite_told"), f=src.pick(("favorite", "favourite")), w=what, v=value)
    asks = (
        f"What is my favorite {what}?",
        f"What's my favourite {what}?",
        f"Which {what} do I like best?",
        f"Do you remember my favorite {what}?",
        f"Tell me my favorite {what}.",
        f"What did I say my favorite {what} is?",
        f"Which {what} is my favorite?",
        f"What {what} do I like most?",
        f"Which {what} did I say I like?",
        f"What {what} did I mention?",
        f"Can you recall my favorite {what}?",
    )
    return Told(
        says, f"{value[0].upper()}{value[1:]} is a fine choice.", asks, f"Your favorite {what} is {value}.", value
    )


def _asks_for(what: str) -> tuple[str, ...]:
    return (
        f"What is my {what}?",
        f"What's my {what}?",
        f"Do you remember my {what}?",
        f"Tell me my {what}.",
        f"What was my {what}?",
        f"What did I say my {what} is?",
        f"Which {what} did I tell you?",
        f"Can you repeat my {what}?",
        f"What {what} did I mention?",
        f"Remind me of my {what}.",
        f"Do you know my {what}?",
        f"Please tell me my {what} again.",
    )


def _thing(src: Source) -> Told:
    what = src.pick(
        (
            "password",
            "code",
            "code word",
            "secret word",
            "meeting",
            "project",
            "magic word",
            "key",
            "train",
            "flight",
            "appointment",
            f"{src.noun()} code",
            f"{src.word()} {src.noun()}",
            f"{src.noun()}",
        )
    )
    value = (
        src.pick((src.time(), src.date()))
        if what in ("meeting", "train", "flight", "appointment")
        else src.pick((src.word(), src.coined(), src.code(), str(src.number()), src.name()))
    )
    verb = (
        "is at"
        if ":" in value or (value.endswith("m") and what in ("meeting", "train", "flight", "appointment"))
        else "is on"
        if what in ("meeting", "train", "flight", "appointment")
        else "is"
    )
    says = src.ask(phrasings("multi_turn", "thing_told"), w=what, v=value, b=verb)
    if verb == "is":
        asks: tuple[str, ...] = (
            f"What is the {what}?",
            f"What's the {what}?",
            f"Do you remember the {what}?",
            f"Tell me the {what}.",
            f"What was the {what}?",
            f"What did I say the {what} is?",
            f"Remind me of the {what}.",
            f"Which {what} did I tell you?",
        )
    else:
        asks = (
            f"When is the {what}?",
            f"When's the {what}?",
            f"What time is the {what}?" if verb == "is at" else f"What date is the {what}?",
            f"Do you remember when the {what} is?",
            f"Tell me when the {what} is.",
            f"When did I say the {what} is?",
            f"When was the {what} again?",
            f"For when is the {what}?",
        )
    return Told(says, "I will remember that.", asks, f"The {what} {verb} {value}.", value)


_TELLERS: Final = (
    (_name, 4.0),
    (_number, 3.0),
    (_age, 1.5),
    (_city, 3.0),
    (_job, 1.2),
    (_pet, 1.5),
    (_relative, 1.5),
    (_favourite, 4.0),
    (_thing, 3.0),
)
_DISTRACTORS: Final = (
    (smalltalk.smalltalk, 4.0),
    (facts.capital, 2.0),
    (facts.opposite, 1.5),
    (facts.colour, 1.0),
    (facts.day, 1.0),
    (facts.plain, 0.7),
    (arithmetic.arithmetic, 2.0),
    (transforms.repeat, 0.6),
    (transforms.uppercase, 0.5),
    (counting.spelling, 0.7),
    (counting.counting, 0.5),
    (smalltalk.unknown, 0.5),
)


def _say(messages: list[dict[str, Any]], user: str, answer: str, thought: str = "") -> None:
    messages.append({"role": "user", "content": user})
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    if thought:
        message["reasoning_content"] = thought
    messages.append(message)


def recall(src: Source) -> Sample:
    told, tellers, turns = _telling(src)
    if src.chance(0.12):
        _correct(src, tellers[0], told, turns)
    turns = turns[:7]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        _say(messages, *turn)
    fact = src.pick(told)
    spoken = " ".join(turn[0] for turn in turns)
    if fact.value not in spoken:
        fact = told[0]
    if tellers[0] is _name and src.chance(0.12) and told[0].value in spoken:
        return _name_used(src, messages, told[0].value)
    _say(messages, src.ask(fact.asks), fact.answer, f"The user told me: {fact.value}.")
    return Sample("multi-turn", messages, "contains", (fact.value,))


def _telling(src: Source) -> tuple[list[Told], list[Any], list[Said]]:
    """Return the turns in which the user states facts, mixed with other turns."""
    tellers: list[Any] = []
    while len(tellers) < src.weighted(((1, 4), (2, 3), (3, 2))):
        teller = src.weighted(_TELLERS)
        if teller not in tellers:
            tellers.append(teller)
    distance = src.integer(0, 6)
    told: list[Told] = [teller(src) for teller in tellers]
    turns: list[Said] = [(fact.says, fact.reply, f"The user tells me something: {fact.value}.") for fact in told]
    if len(told) > 1 and src.chance(0.25):
        # One message may state several facts.
        first = told[0].says if told[0].says[-1] in ".!?" else told[0].says + "."
        turns[:2] = [
            (f"{first} {told[1].says}", told[0].reply, f"The user tells me {told[0].value} and {told[1].value}.")
        ]
    while len(turns) < len(tellers) + max(0, distance - 1) and len(turns) < 7:
        place = src.integer(1, len(turns))
        turn: Turn = src.weighted(_DISTRACTORS)(src)
        turns.insert(place, (turn.user, turn.answer, turn.thought))
    return told, tellers, turns


def _correct(src: Source, teller: Any, told: list[Told], turns: list[Said]) -> None:
    """Add a turn in which the user corrects the first fact."""
    changed = teller(src)
    if changed.answer.split(" is ")[0] != told[0].answer.split(" is ")[0] or changed.value == told[0].value:
        return
    said = changed.says
    if not said.startswith(("I", changed.value)):
        said = said[:1].lower() + said[1:]
    start = src.pick(("Actually, ", "Correction: ", "I was wrong, ", "No wait, "))
    turns.append((start + said, changed.reply, f"The user corrects it: {changed.value}."))
    told[0] = changed


_USES: Final[tuple[tuple[tuple[str, ...], Callable[[str], str]], ...]] = (
    (
        ("Greet me by my name.", "Say hello to me, using my name.", "Greet me with my name.", "Say hi to me by name."),
        "Hello, {}!".format,
    ),
    (("Spell my name.", "How do you spell my name?", "Can you spell my name?", "Spell my name, please."), "-".join),
    (("Write my name in uppercase.", "Put my name in capital letters.", "My name in all caps, please."), str.upper),
)


def _name_used(src: Source, messages: list[dict[str, Any]], name: str) -> Sample:
    requests, make = _USES[src.integer(0, 2)]
    _say(messages, src.pick(requests), make(name), f"The user is called {name}.")
    key = messages[-1]["content"]
    return Sample("multi-turn", messages, "contains", (key.strip("!").removeprefix("Hello, "),))


def not_told(src: Source) -> Sample:
    """Return a conversation in which the user asks for a fact that was never stated."""
    messages: list[dict[str, Any]] = []
    for _ in range(src.integer(0, 3)):
        turn: Turn = src.weighted(_DISTRACTORS)(src)
        _say(messages, turn.user, turn.answer, turn.thought)
    missing = src.weighted(_TELLERS)(src)
    _say(messages, src.ask(missing.asks), "You have not told me that yet.", "The user has not told me this.")
    return Sample("multi-turn", messages, "contains", ("not told me",))


def previous(src: Source) -> Sample:
    """Return a conversation in which the user asks about the conversation itself."""
    messages: list[dict[str, Any]] = []
    for _ in range(src.integer(1, 4)):
        turn: Turn = src.weighted(_DISTRACTORS)(src)
        _say(messages, turn.user, turn.answer, turn.thought)
    kind = src.integer(0, 2)
    if kind == 0:
        question, answer = (src.ask(phrasings("multi_turn", "last_answer")), messages[-1]["content"])
    elif kind == 1:
        question, answer = (src.ask(phrasings("multi_turn", "last_question")), messages[-2]["content"])
    else:
        question, answer = (src.ask(phrasings("multi_turn", "first_question")), messages[0]["content"])
    _say(messages, question, answer, "I look at the conversation.")
    return Sample("multi-turn", messages, "contains", (answer,))
