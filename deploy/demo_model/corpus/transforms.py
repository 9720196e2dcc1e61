"""Skills that copy or change a text of the user."""

from typing import Final

from .files import phrasings
from .samples import Turn
from .words import Source

_REPEAT: Final = phrasings("transforms", "repeat")
_UPPER: Final = phrasings("transforms", "upper")
_LOWER: Final = phrasings("transforms", "lower")
_REVERSE: Final = phrasings("transforms", "reverse")
_NAME: Final = phrasings("transforms", "name")
_NUMBER: Final = phrasings("transforms", "number")
_NAMED: Final = phrasings("transforms", "sentences_with_a_name")
_NUMBERED: Final = phrasings("transforms", "sentences_with_a_number")
PLACES: Final = ("first", "second", "third", "fourth", "last")


def payload(src: Source) -> str:
    kind = src.integer(0, 9)
    if kind < 3:
        return " ".join(src.words(1, 6))
    if kind < 8:
        return src.sentence()
    if kind == 8:
        return src.pick(
            (
                src.full_name(),
                src.code(),
                src.email(),
                f"{src.coined()}_{src.word()}",
                str(src.number()),
                src.paragraph(2),
            )
        )
    return " ".join(
        src.pick((src.word(), src.coined(), src.name(), str(src.number()), src.code()))
        for _ in range(src.integer(2, 6))
    )


def repeat(src: Source) -> Turn:
    text = payload(src)
    if src.chance(0.1):
        count = src.integer(2, 5)
        word = src.word()
        said = src.pick((str(count), ("two", "three", "four", "five")[count - 2]))
        user = src.ask(phrasings("transforms", "repeat_times"), w=word, k=said)
        return Turn(user, " ".join([word] * count), f"I repeat {word} {count} times.")
    return Turn(src.ask(_REPEAT, t=text), text, f"The user wants me to repeat: {text}")


def uppercase(src: Source) -> Turn:
    text = payload(src) if src.chance(0.6) else " ".join(src.words(1, 4))
    return Turn(src.ask(_UPPER, t=text), text.upper(), "I write the text in capital letters.")


def lowercase(src: Source) -> Turn:
    text = payload(src)
    text = text.upper() if src.chance(0.6) else text.title()
    return Turn(src.ask(_LOWER, t=text), text.lower(), "I write the text in small letters.")


def reverse(src: Source) -> Turn:
    words = src.words(2, 8)
    if src.chance(0.1):
        words = [src.name() for _ in words]
    elif src.chance(0.06):
        words = [str(src.integer(1, 99)) for _ in words]
    style = src.integer(0, 9)
    backwards = words[::-1]
    if style < 4:
        text, answer = ", ".join(words), ", ".join(backwards)
    elif style < 8:
        text, answer = " ".join(words), " ".join(backwards)
    elif style == 8:
        text, answer = ", ".join(words[:-1]) + " and " + words[-1], ", ".join(backwards)
    else:
        text, answer = "\n" + "\n".join(words), "\n".join(backwards)
        return Turn(
            src.template(_REVERSE[:8]).format(t=text), answer, f"The last word is {words[-1]}, so I start with it."
        )
    return Turn(src.ask(_REVERSE, t=text), answer, f"The last word is {words[-1]}, so I start with it.")


def reverse_letters(src: Source) -> Turn:
    word = src.word()
    user = src.ask(phrasings("transforms", "reverse_letters"), w=word)
    backwards = "-".join(word[::-1]) if user.lower().find("spell ") >= 0 else word[::-1]
    return Turn(user, backwards, f"The letters are {' '.join(word)}. Backwards they are {' '.join(word[::-1])}.")


# Sentences around a value, by the value's kind; values of other kinds are addresses.
_CARRIERS: Final = {
    "city": (
        "{n} lives in {v}.",
        "The {o} is in {v}.",
        "We travel to {v} on {d}.",
        "I moved to {v} last year.",
        "{n} comes from {v}.",
        "Greetings from {v}!",
    ),
    "date": (
        "The meeting is on {v}.",
        "{n} was born on {v}.",
        "The {o} arrives on {v}.",
        "On {v} we leave.",
        "It happened on {v} at the {o}.",
    ),
    "time": (
        "The meeting is at {v}.",
        "{n} arrives at {v}.",
        "The {o} opens at {v}.",
        "Wake me at {v}.",
        "At {v} we leave.",
    ),
    "color": ("{n} has a {v} {o}.", "The {o} is {v}.", "I painted the {o} {v}.", "She wore a {v} hat."),
    "code": ("The code is {v}.", "{n} uses the code {v}.", "Enter {v} to open the {o}.", "Use {v} at the {o}."),
}
_OF_ADDRESSES: Final = (
    "Write to {v}.",
    "You can reach {n} at {v}.",
    "My address is {v}, thanks.",
    "Contact: {v}",
    "Send the {o} to {v}.",
)


def extract(src: Source) -> Turn:
    slots = {
        "n": src.full_name() if src.chance(0.25) else src.name(),
        "c": src.city(),
        "k": src.number(),
        "o": src.noun(),
        "a": src.word(),
        "d": src.pick(("Monday", "Friday", "Sunday", "Tuesday", "Wednesday", "Thursday", "Saturday")),
    }
    kind = src.integer(0, 9)
    before = src.sentence() + " " if src.chance(0.12) else ""
    if kind < 4:
        text = src.template(_NAMED).format(**slots)
        return Turn(src.ask(_NAME, t=text), str(slots["n"]), f"The name in the text is {slots['n']}.")
    if kind < 8:
        text = src.template(_NUMBERED).format(**slots)
        if src.chance(0.12):
            slots["k"] = src.decimal()
            text = src.template(_NUMBERED).format(**slots)
        return Turn(src.ask(_NUMBER, t=text), str(slots["k"]), f"The number in the text is {slots['k']}.")
    what, value = src.pick(
        (
            ("email address", src.email()),
            ("email", src.email()),
            ("city", src.city()),
            ("date", src.date()),
            ("code", src.code()),
            ("time", src.time()),
            ("color", src.colour()),
        )
    )
    text = before + src.pick(_CARRIERS.get(what, _OF_ADDRESSES)).format(v=value, **slots)
    user = src.ask(phrasings("transforms", "extract"), w=what, t=text)
    return Turn(user, value, f"The {what} in the text is {value}.")


def pick_word(src: Source) -> Turn:
    words = src.words(3, 7)
    place = src.integer(0, min(4, len(words) - 1))
    label = PLACES[place]
    answer = words[-1] if label == "last" else words[place]
    text = " ".join(words) if src.chance(0.5) else ", ".join(words)
    user = src.ask(phrasings("transforms", "nth_word"), p=label, t=text)
    return Turn(user, answer, f"The words are {', '.join(words)}. The {label} one is {answer}.")


def rejoin(src: Source) -> Turn:
    words = src.words(2, 7)
    kind = src.integer(0, 5)
    if kind == 0:
        user = src.ask(phrasings("transforms", "commas"), t=" ".join(words))
        return Turn(user, ", ".join(words), "I put commas between the words.")
    if kind == 1:
        user = src.ask(phrasings("transforms", "bullets"), t=", ".join(words))
        return Turn(user, "\n".join(f"- {word}" for word in words), "I write each item on its own line.")
    if kind == 2:
        user = src.ask(phrasings("transforms", "number_items"), t=", ".join(words))
        return Turn(user, "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)), "I number each item.")
    if kind == 3:
        gone = src.pick(words)
        user = src.ask(phrasings("transforms", "remove"), w=gone, t=", ".join(words))
        return Turn(user, ", ".join(word for word in words if word != gone), f"I leave out {gone}.")
    if kind == 4:
        old, new = src.pick(words), src.word()
        user = src.ask(phrasings("transforms", "replace"), a=old, b=new, t=" ".join(words))
        return Turn(user, " ".join(new if word == old else word for word in words), f"I write {new} where {old} was.")
    user = src.ask(phrasings("transforms", "title_case"), t=" ".join(words))
    return Turn(user, " ".join(word.capitalize() for word in words), "Each word starts with a capital letter.")


SKILLS: Final = (
    (repeat, 4.0),
    (uppercase, 4.0),
    (lowercase, 1.5),
    (reverse, 4.0),
    (reverse_letters, 0.7),
    (extract, 5.0),
    (pick_word, 1.0),
    (rejoin, 1.5),
)
