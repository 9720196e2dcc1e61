"""Values of tool arguments: the phrase that people use for a value, and its JSON value."""

from collections.abc import Callable
from typing import Any, Final

from .files import word_list
from .json_tasks import listing
from .words import FOODS, HOBBIES, LANGUAGES, NUMBER_WORDS, Source

ROOMS: Final = word_list("rooms")
CURRENCIES: Final = word_list("currencies")
UNITS: Final = word_list("units")
COMMANDS: Final = word_list("commands")


def draw(src: Source, kind: str) -> tuple[str, Any]:
    """Return a random value of `kind`: the phrase that people use for it, and its JSON value."""
    kind, _, limits = kind.partition(":")
    match kind:
        case "enum":
            value = src.pick(limits.split(","))
            return (value.capitalize() if src.chance(0.1) else value), value
        case "int":
            low, high = map(int, limits.split(","))
            value = src.integer(low, high)
            spoken = NUMBER_WORDS[value] if 1 < value <= 20 and src.chance(0.2) else str(value)
            return spoken, value
        case "number":
            low, high = map(int, limits.split(","))
            value = src.integer(low, high) if src.chance(0.5) else round(src.rng.uniform(low, high), src.pick((1, 2)))
            return str(value), value
        case "switch" | "mute" | "lock":
            value = src.chance(0.5)
            return {"switch": ("off", "on"), "mute": ("unmute", "mute"), "lock": ("unlock", "lock")}[kind][value], value
        case "foods" | "words" | "names" | "numbers":
            count = src.integer(2, 4)
            if kind == "numbers":
                numbers = [src.number() for _ in range(count)]
                return listing(src, [str(n) for n in numbers]), numbers
            make: Callable[[], str] = {"foods": lambda: src.pick(FOODS), "words": src.word, "names": src.name}[kind]
            items = list(dict.fromkeys(make() for _ in range(count)))
            return listing(src, items), items
    text = STRINGS[kind](src)
    return text, text


def _phrase(src: Source) -> str:
    if src.chance(0.7):
        return " ".join(src.words(1, 3))
    return src.pick(
        (f"{src.name()}'s {src.noun()}", f"the {src.word()} {src.noun()}", f"{src.word().capitalize()} {src.noun()}")
    )


def _text(src: Source) -> str:
    return src.sentence().rstrip(".") if src.chance(0.6) else " ".join(src.words(2, 5))


def _date(src: Source) -> str:
    return src.date() if src.chance(0.8) else src.pick(("Monday", "Tuesday", "Friday", "Sunday", "tomorrow", "today"))


def _expression(src: Source) -> str:
    parts = [str(src.number())]
    for _ in range(src.integer(1, 2)):
        parts += [src.pick("+-*/"), str(src.number())]
    return src.pick((" ", " ", "")).join(parts)


def _place(src: Source) -> str:
    return src.pick(
        (
            f"{src.name()}'s {src.noun().capitalize()}",
            f"The {src.word().capitalize()} {src.noun().capitalize()}",
            src.coined().capitalize(),
        )
    )


def _path(src: Source) -> str:
    folder = src.pick(("", "", f"{src.word()}/", f"/{src.word()}/{src.word()}/", f"src/{src.word()}/"))
    name = src.pick((src.word(), f"{src.word()}_{src.noun()}"))
    return f"{folder}{name}.{src.pick(('txt', 'py', 'md', 'json', 'csv', 'log', 'toml', 'html'))}"


def _folder(src: Source) -> str:
    return src.pick(
        (
            f"/{src.word()}/{src.word()}",
            f"{src.word()}/{src.noun()}",
            src.word(),
            f"src/{src.word()}",
            f"~/{src.noun()}",
        )
    )


def _topic(src: Source) -> str:
    made = (src.noun(), src.word(), src.city(), f"{src.word()} {src.noun()}")
    return src.pick((*made, "sports", "politics", "science", "music"))


def _phone(src: Source) -> str:
    return src.pick(("", "+")) + "".join(src.pick("0123456789") for _ in range(src.integer(5, 10)))


STRINGS: Final[dict[str, Callable[[Source], str]]] = {
    "city": Source.city,
    "name": Source.name,
    "full_name": lambda src: src.full_name() if src.chance(0.6) else src.name(),
    "email": Source.email,
    "phrase": _phrase,
    "text": _text,
    "word": Source.word,
    "noun": Source.noun,
    "time": Source.time,
    "date": _date,
    "language": lambda src: src.pick(LANGUAGES),
    "room": lambda src: src.pick(ROOMS) if src.chance(0.8) else src.noun(),
    "colour": Source.colour,
    "currency": lambda src: src.pick(CURRENCIES),
    "unit": lambda src: src.pick(UNITS),
    "ticker": lambda src: "".join(src.pick("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(src.integer(2, 5))),
    "expression": _expression,
    "place": _place,
    "path": _path,
    "folder": _folder,
    "command": lambda src: src.pick(COMMANDS).format(a=src.word(), b=src.noun()),
    "ident": lambda src: identifier(src, [src.word(), src.noun()]) if src.chance(0.6) else src.word(),
    "code": Source.code,
    "hobby": lambda src: src.pick(HOBBIES),
    "topic": _topic,
    "phone": _phone,
}


def identifier(src: Source, parts: list[str]) -> str:
    style = src.integer(0, 9)
    if style < 6:
        return "_".join(parts)
    if style < 8:
        return parts[0] + "".join(p.capitalize() for p in parts[1:])
    return "-".join(parts) if style == 8 else "".join(p.capitalize() for p in parts)
