"""JSON skill: the prompt has a schema of up to four fields and a text with their values; the answer is bare JSON."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .files import phrasings
from .samples import Turn
from .words import ANIMALS, COLOURS, FOODS, HOBBIES, JOBS, LANGUAGES, WEEKDAYS, Source


class Field(NamedTuple):
    """Field of an object: its name, its JSON type, its value, and phrases that state the value."""

    name: str
    type: str
    value: Any
    phrases: tuple[str, ...]
    enum: tuple[str, ...] = ()


def listing(src: Source, items: list[str]) -> str:
    if len(items) == 1:
        return items[0]
    return (
        ", ".join(items)
        if src.chance(0.25)
        else ", ".join(items[:-1]) + src.pick((" and ", " and ", ", and ")) + items[-1]
    )


def _flag(src: Source, yes: str, no: str) -> tuple[bool, tuple[str, ...]]:
    value = src.chance(0.5)
    return value, ((yes if value else no),)


def _person(src: Source) -> tuple[str, list[Field]]:
    name = src.full_name() if src.chance(0.4) else src.name()
    student, says = _flag(src, "is a student", "is not a student")
    hobbies = src.sample(HOBBIES, src.integer(1, 3))
    return name, [
        Field("name", "string", name, ()),
        Field(
            "age",
            "integer",
            age := src.integer(5, 95),
            (f"is {age} years old", f"is {age}", f"is aged {age}", f"turned {age}"),
        ),
        Field("city", "string", city := src.city(), (f"lives in {city}", f"is from {city}", f"comes from {city}")),
        Field(
            "job",
            "string",
            job := src.pick(JOBS),
            (f"works as a {job}", f"is a {job} by trade", f"has a job as a {job}"),
        ),
        Field("email", "string", mail := src.email(), (f"can be reached at {mail}", f"has the email {mail}")),
        Field("is_student", "boolean", student, says),
        Field(
            "hobbies",
            "array of strings",
            hobbies,
            (f"likes {listing(src, hobbies)}", f"enjoys {listing(src, hobbies)}"),
        ),
    ]


def _product(src: Source) -> tuple[str, list[Field]]:
    name = src.pick(
        (
            src.noun(),
            f"{src.colour()} {src.noun()}",
            f"{src.word().capitalize()} {src.noun()}",
            f"{src.word().capitalize()} {src.noun().capitalize()}",
            src.coined(1, 3).capitalize(),
        )
    )
    stock, says = _flag(src, "is in stock", "is out of stock")
    price = src.decimal() if src.chance(0.6) else src.integer(1, 900)
    return f"The {name}", [
        Field(src.pick(("name", "product", "item")), "string", name, ()),
        Field(
            "price",
            "number",
            price,
            (f"costs {price} dollars", f"costs ${price}", f"is sold for {price} euros", f"has a price of {price}"),
        ),
        Field(
            "quantity",
            "integer",
            count := src.integer(1, 500),
            (f"comes in a box of {count}", f"has a quantity of {count}", f"was ordered {count} times"),
        ),
        Field("color", "string", colour := src.pick(COLOURS), (f"is painted {colour}", f"comes in {colour}")),
        Field("in_stock", "boolean", stock, says),
        Field(
            "size",
            "string",
            size := src.pick(("small", "medium", "large")),
            (f"is {size}", f"has size {size}"),
            ("small", "medium", "large"),
        ),
        Field(
            "tags",
            "array of strings",
            tags := src.words(2, 3),
            (f"has the tags {listing(src, tags)}", f"is tagged {listing(src, tags)}"),
        ),
    ]


def _event(src: Source) -> tuple[str, list[Field]]:
    title = src.pick(
        (
            f"{src.noun()} {src.pick(('meeting', 'party', 'workshop', 'review', 'concert'))}",
            f"{src.coined(1, 2)} {src.pick(('festival', 'call', 'show'))}",
        )
    )
    online, says = _flag(src, "is online", "is not online")
    guests = [src.name() for _ in range(src.integer(2, 3))]
    return f"The {title}", [
        Field(src.pick(("title", "event", "name")), "string", title, ()),
        Field("date", "string", date := src.date(), (f"takes place on {date}", f"is on {date}")),
        Field("time", "string", time := src.time(), (f"starts at {time}", f"begins at {time}")),
        Field("location", "string", city := src.city(), (f"is in {city}", f"is held in {city}")),
        Field(
            "attendees", "integer", count := src.integer(2, 400), (f"has {count} attendees", f"expects {count} people")
        ),
        Field("online", "boolean", online, says),
        Field(
            "guests",
            "array of strings",
            guests,
            (f"has the guests {listing(src, guests)}", f"is visited by {listing(src, guests)}"),
        ),
        Field("day", "string", day := src.pick(WEEKDAYS), (f"happens every {day}", f"falls on a {day}")),
    ]


def _book(src: Source) -> tuple[str, list[Field]]:
    title = f"The {src.word().capitalize()} {src.noun().capitalize()}"
    return f'"{title}"' if src.chance(0.5) else f"The book {title}", [
        Field("title", "string", title, ()),
        Field("author", "string", author := src.full_name(), (f"was written by {author}", f"is by {author}")),
        Field(
            "year",
            "integer",
            year := src.integer(1800, 2026),
            (f"was published in {year}", f"came out in {year}", f"appeared in {year}"),
        ),
        Field("pages", "integer", pages := src.integer(20, 1200), (f"has {pages} pages", f"is {pages} pages long")),
        Field(
            "language", "string", language := src.pick(LANGUAGES), (f"is written in {language}", f"is in {language}")
        ),
        Field(
            "rating",
            "number",
            rating := round(src.rng.uniform(1, 5), 1),
            (f"has a rating of {rating}", f"is rated {rating}"),
        ),
    ]


def _animal(src: Source) -> tuple[str, list[Field]]:
    name = src.name()
    friendly, says = _flag(src, "is friendly", "is not friendly")
    return name, [
        Field("name", "string", name, ()),
        Field(src.pick(("animal", "species", "kind")), "string", animal := src.pick(ANIMALS), (f"is a {animal}",)),
        Field("age", "integer", age := src.integer(1, 30), (f"is {age} years old", f"is aged {age}")),
        Field("color", "string", colour := src.pick(COLOURS), (f"has {colour} fur", f"is {colour}")),
        Field("owner", "string", owner := src.name(), (f"belongs to {owner}", f"lives with {owner}")),
        Field("friendly", "boolean", friendly, says),
        Field("weight", "number", weight := src.decimal(), (f"weighs {weight} kilos", f"has a weight of {weight} kg")),
    ]


def _order(src: Source) -> tuple[str, list[Field]]:
    code = src.code() if src.chance(0.6) else str(src.integer(100, 99999))
    paid, says = _flag(src, "is paid", "is not paid")
    items = src.sample(FOODS, src.integer(2, 3))
    states = ("pending", "shipped", "delivered", "cancelled")
    return f"Order {code}", [
        Field(src.pick(("order_id", "id", "order")), "string", code, ()),
        Field("customer", "string", who := src.full_name(), (f"was placed by {who}", f"is for {who}")),
        Field("total", "number", total := src.decimal(), (f"costs {total} in total", f"has a total of {total}")),
        Field(
            "items",
            "array of strings",
            items,
            (f"contains {listing(src, items)}", f"has the items {listing(src, items)}"),
        ),
        Field("paid", "boolean", paid, says),
        Field("status", "string", state := src.pick(states), (f"is {state}", f"has the status {state}"), states),
        Field("city", "string", city := src.city(), (f"goes to {city}", f"ships to {city}")),
    ]


def _film(src: Source) -> tuple[str, list[Field]]:
    title = src.pick(
        (
            f"{src.word().capitalize()} {src.noun().capitalize()}",
            src.word().capitalize(),
            f"The {src.noun().capitalize()}",
        )
    )
    kind = src.pick(("film", "song", "album", "movie", "game", "play"))
    return src.pick((f"The {kind} {title}", title)), [
        Field(src.pick(("title", "title", "name", kind)), "string", title, ()),
        Field(
            "year",
            "integer",
            year := src.integer(1900, 2030),
            (f"came out in {year}", f"was released in {year}", f"is from {year}"),
        ),
        Field(
            src.pick(("director", "artist", "author")),
            "string",
            who := src.full_name(),
            (f"was made by {who}", f"is by {who}"),
        ),
        Field(
            src.pick(("length", "minutes", "duration")),
            "integer",
            minutes := src.integer(2, 240),
            (f"is {minutes} minutes long", f"lasts {minutes} minutes"),
        ),
        Field(
            "genre",
            "string",
            genre := src.pick(("comedy", "drama", "rock", "jazz", "horror", "action")),
            (f"is a {genre} piece", f"belongs to the genre {genre}"),
        ),
        Field(
            src.pick(("rating", "score")),
            "number",
            score := round(src.rng.uniform(1, 10), 1),
            (f"has a score of {score}", f"is rated {score}"),
        ),
    ]


def _place(src: Source) -> tuple[str, list[Field]]:
    name, kind = src.city(), src.pick(("city", "town", "village", "river", "country"))
    capital, says = _flag(src, "is a capital", "is not a capital")
    return src.pick((f"The {kind} of {name}", name, f"The {kind} {name}")), [
        Field(src.pick(("name", "city", "place", kind)), "string", name, ()),
        Field(
            "population",
            "integer",
            people := src.number(),
            (f"has a population of {people}", f"has {people} inhabitants", f"is home to {people} people"),
        ),
        Field(
            "country",
            "string",
            country := src.city(),
            (f"is in {country}", f"lies in {country}", f"belongs to {country}"),
        ),
        Field("mayor", "string", mayor := src.full_name(), (f"has the mayor {mayor}", f"is led by {mayor}")),
        Field(
            src.pick(("area", "size_km")),
            "number",
            area := src.decimal(),
            (f"covers {area} square kilometers", f"has an area of {area} km"),
        ),
        Field("is_capital", "boolean", capital, says),
        Field("founded", "integer", year := src.integer(900, 2000), (f"was founded in {year}", f"dates from {year}")),
    ]


def _made_up(src: Source) -> tuple[str, list[Field]]:
    """Return a made-up object, and its fields with made-up keys."""
    fields: list[Field] = []
    taken: set[str] = set()
    while len(fields) < 5:
        key = src.word() if src.chance(0.6) else f"{src.word()}_{src.noun()}"
        if key in taken:
            continue
        taken.add(key)
        said = key.replace("_", " ")
        kind = src.weighted(
            (("string", 4), ("integer", 3), ("number", 1.5), ("boolean", 1.5), ("array of strings", 1.5))
        )
        value: Any = {
            "string": lambda: src.pick((src.word(), src.name(), src.city(), src.code())),
            "integer": src.number,
            "number": src.decimal,
            "boolean": lambda: src.chance(0.5),
            "array of strings": lambda: src.words(2, 3),
        }[kind]()
        if kind == "boolean":
            phrases = (
                f"has {said}" if value else f"has no {said}",
                f"has {said} set to {'true' if value else 'false'}",
                f"has {said}: {'yes' if value else 'no'}",
            )
        else:
            shown = listing(src, value) if isinstance(value, list) else value
            phrases = (
                f"has the {said} {shown}",
                f"has a {said} of {shown}",
                f"has {said} {shown}",
                f"has {said} = {shown}",
            )
        fields.append(Field(key, kind, value, phrases))
    return f"The {src.noun()}", fields


ENTITIES: Final[tuple[Callable[[Source], tuple[str, list[Field]]], ...]] = (
    _person,
    _person,
    _product,
    _event,
    _book,
    _animal,
    _order,
    _film,
    _place,
    _made_up,
    _made_up,
)

_TASK: Final = phrasings("json_tasks", "fields")
_SCHEMA: Final = phrasings("json_tasks", "schema")


def _tell(src: Source, subject: str, fields: list[Field]) -> str:
    """Return a text that states the values of all fields, in one of several forms."""
    told = [f for f in fields if f.phrases]
    style = src.integer(0, 9)
    if style >= 8:
        return src.pick((", ", "; ", "\n")).join(f"{f.name.replace('_', ' ')}: {_shown(src, f.value)}" for f in fields)
    phrases = [src.pick(f.phrases) for f in told]
    if not phrases:
        return f"This is about {subject[:1].lower() + subject[1:] if subject.startswith('The ') else subject}."
    if style < 5 or len(phrases) == 1:
        return subject + " " + (", ".join(phrases[:-1]) + " and " if len(phrases) > 1 else "") + phrases[-1] + "."
    pronoun = src.pick(("It", "It")) if subject.startswith(("The ", "Order", '"')) else src.pick(("He", "She"))
    return f"{subject} {phrases[0]}. " + " ".join(f"{pronoun} {phrase}." for phrase in phrases[1:])


def _shown(src: Source, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return listing(src, value)
        case _:
            return str(value)


def _described(src: Source, fields: list[Field]) -> str:
    style = src.integer(0, 4)
    if style == 0:
        parts = [f.name for f in fields]
    elif style == 1:
        parts = [f"{f.name} ({f.type})" for f in fields]
    elif style == 2:
        parts = [f'"{f.name}"' for f in fields]
    elif style == 3:
        parts = [f"{f.name}: {f.type}" for f in fields]
    else:
        return "\n" + "\n".join(
            f"- {f.name} ({f.type})" + (f", one of {', '.join(f.enum)}" if f.enum else "") for f in fields
        )
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 and src.chance(0.5) else ", ".join(parts)


def json_schema(fields: list[Field]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for f in fields:
        properties[f.name] = (
            {"type": "array", "items": {"type": "string"}} if f.type.startswith("array") else {"type": f.type}
        )
        if f.enum:
            properties[f.name]["enum"] = list(f.enum)
    return {"type": "object", "properties": properties}


def _schema_text(src: Source, fields: list[Field]) -> str:
    if src.chance(0.6):
        shape = json_schema(fields)
        if src.chance(0.65):
            shape["required"] = [f.name for f in fields]
        if src.chance(0.15):
            shape["additionalProperties"] = False
        return json.dumps(shape, indent=src.pick((None, None, 2)))
    short = {f.name: ["string"] if f.type.startswith("array") else f.type for f in fields}
    return (
        json.dumps(short)
        if src.chance(0.7)
        else "{" + ", ".join(f"{k}: {v if isinstance(v, str) else 'string[]'}" for k, v in short.items()) + "}"
    )


def json_task(src: Source) -> Turn:
    subject, fields = src.pick(ENTITIES)(src)
    subject_fields = [f for f in fields if not f.phrases]
    others = src.sample(
        [f for f in fields if f.phrases], src.integer(0 if subject_fields else 1, min(4 - len(subject_fields), 4))
    )
    if not others:
        others = src.sample([f for f in fields if f.phrases], 1)
    told = [*subject_fields, *others]
    if any(f.name == "color" for f in told) and any(f.name in ("size",) for f in told):
        told = [f for f in told if f.name != "size"]
    if len(told) > 2:
        ages = [f for f in told if f.phrases]
        src.rng.shuffle(ages)
        told = [*subject_fields, *ages]
    text = _tell(src, subject, told)
    wanted = list(told)
    if src.chance(0.35):
        src.rng.shuffle(wanted)
    if len(wanted) > 1 and src.chance(0.2):
        wanted.pop()
    if src.chance(0.1):
        text = src.sentence() + " " + text
    answer = json.dumps({f.name: f.value for f in wanted}, ensure_ascii=False)
    if src.chance(0.55):
        user = src.ask(_TASK, s=_described(src, wanted), t=text)
    else:
        user = src.template(_SCHEMA).format(s=_schema_text(src, wanted), t=text)
    thought = "The values are " + ", ".join(f"{f.name} {_shown(src, f.value)}" for f in wanted) + "."
    return Turn(user, answer, thought, "json")


SKILLS: Final = ((json_task, 1.0),)
