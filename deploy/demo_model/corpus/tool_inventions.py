"""Tools that nobody has seen: made-up actions, objects and parameters, and requests for them."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from .tool_requests import Ask, Param, schema
from .tool_values import draw, identifier
from .words import NOUNS, Source

ACTIONS: Final = (
    ("get", ("get", "give me", "fetch", "show me")), ("find", ("find", "look for")), ("create", ("create", "make", "add")), ("delete", ("delete", "remove")),
    ("update", ("update", "change")), ("start", ("start", "begin")), ("stop", ("stop", "end", "halt")), ("send", ("send",)), ("open", ("open",)), ("close", ("close",)),
    ("check", ("check",)), ("list", ("list", "show")), ("book", ("book", "reserve")), ("cancel", ("cancel",)), ("order", ("order",)), ("rename", ("rename",)),
    ("move", ("move",)), ("copy", ("copy",)), ("print", ("print",)), ("scan", ("scan",)), ("export", ("export",)), ("import", ("import",)), ("archive", ("archive",)),
    ("lookup", ("look up",)), ("register", ("register",)), ("schedule", ("schedule", "plan")), ("assign", ("assign",)), ("measure", ("measure",)), ("repair", ("repair", "fix")),
    ("clean", ("clean",)), ("paint", ("paint",)), ("lock", ("lock",)), ("unlock", ("unlock",)), ("activate", ("activate", "enable")), ("reset", ("reset",)), ("sync", ("sync",)),
    ("compare", ("compare",)), ("rate", ("rate",)), ("share", ("share",)), ("upload", ("upload",)), ("download", ("download",)), ("configure", ("configure", "set up")),
)  # fmt: skip
_KEYS: Final = (
    ("name", "word name full_name"),
    ("title", "phrase"),
    ("id", "code int:1,9999"),
    ("city", "city"),
    ("count", "int:1,60"),
    ("amount", "number:1,900 int:1,90"),
    ("color", "colour"),
    ("size", "enum:small,medium,large int:1,90"),
    ("mode", "enum:fast,slow,auto enum:eco,normal,turbo enum:read,write"),
    ("date", "date"),
    ("time", "time"),
    ("owner", "name full_name"),
    ("tags", "words"),
    ("items", "words foods"),
    ("enabled", "bool"),
    ("verbose", "bool"),
    ("urgent", "bool"),
    ("public", "bool"),
    ("priority", "enum:low,medium,high int:1,5"),
    ("level", "int:1,99 enum:low,normal,high"),
    ("weight", "number:1,200"),
    ("length", "number:1,90"),
    ("price", "number:1,900"),
    ("speed", "int:1,200"),
    ("format", "enum:pdf,csv,json enum:png,jpg,svg"),
    ("language", "language"),
    ("room", "room"),
    ("path", "path"),
    ("email", "email"),
    ("label", "word"),
    ("code", "code"),
    ("members", "names"),
    ("values", "numbers"),
    ("zone", "word enum:north,south,east,west"),
    ("status", "enum:open,closed,pending enum:active,inactive"),
    ("duration", "int:1,120"),
    ("temperature", "number:1,99 int:1,250"),
    ("target", "word city name"),
    ("source", "word city path"),
    ("from", "city word"),
    ("to", "city name word"),
    ("width", "int:1,2000"),
    ("height", "int:1,2000"),
    ("agent", "name full_name"),
    ("customer", "name full_name"),
    ("person", "name"),
    ("liters", "number:1,90 int:1,90"),
    ("minutes", "int:1,120"),
    ("kilos", "number:1,90 int:1,90"),
    ("hours", "int:1,48 number:1,40"),
    ("days", "int:1,30"),
    ("reason", "phrase text"),
    ("message", "text"),
    ("file", "path"),
    ("number", "int:1,9999"),
    ("year", "int:1900,2030"),
    ("station", "city"),
    ("unit", "enum:celsius,fahrenheit enum:metric,imperial enum:km,miles"),
    ("currency", "currency"),
    ("active", "bool"),
    ("quiet", "bool"),
    ("type", "word enum:basic,premium,family"),
    ("category", "word"),
    ("topic", "topic"),
)
# How people say a value without its parameter's name.
_NATURAL: Final = {
    "city": ("in {v}", "in {v}", "for {v}"), "date": ("on {v}", "for {v}"), "time": ("at {v}",), "source": ("from {v}",), "target": ("to {v}", "for {v}"), "owner": ("for {v}", "of {v}"), "duration": ("for {v} minutes",),
    "language": ("in {v}",), "format": ("as {v}", "in {v} format"), "room": ("in the {v}",), "label": ("labelled {v}", "with label {v}"), "members": ("with {v}",), "price": ("for {v} dollars",), "speed": ("at a speed of {v}",),
    "title": ('called "{v}"', "called {v}", "titled {v}"), "name": ("named {v}", "called {v}"), "id": ("number {v}", "with id {v}"), "from": ("from {v}", "from {v}"), "to": ("to {v}", "to {v}"), "agent": ("to {v}", "for {v}"),
    "customer": ("for {v}",), "person": ("for {v}", "to {v}"), "mode": ("in {v} mode", "on {v}"), "reason": ("because of {v}",), "message": ('saying "{v}"',), "file": ("in {v}", "from {v}"), "year": ("from {v}", "of {v}"),
    "station": ("at {v}", "from {v}"), "unit": ("in {v}",), "currency": ("in {v}",), "temperature": ("at {v} degrees", "to {v} degrees"), "priority": ("with {v} priority",), "items": ("with {v}", "containing {v}"), "count": ("{v} times",),
    "color": ("in {v}",), "path": ("at {v}", "in {v}"), "email": ("to {v}", "for {v}"), "level": ("at level {v}", "to {v}"), "topic": ("about {v}", "on {v}"), "category": ("in the category {v}",), "size": ("in size {v}",),
}  # fmt: skip
_BOTH: Final = ("with {h} {v}", "with {h} {v}", "with the {h} {v}", "{h} {v}", "{h}: {v}", "where the {h} is {v}", "using {v} as the {h}", "and set the {h} to {v}", "with a {h} of {v}",
                "the {h} should be {v}", "{h} = {v}", "whose {h} is {v}", "with {v} as {h}", "setting {h} to {v}")  # fmt: skip
_YES: Final = (
    "with {h} on",
    "with {h} enabled",
    "{h}: yes",
    "with {h} set to true",
    "{h} = true",
    "and make it {h}",
    "it is {h}",
    "with {h} turned on",
)
_NO: Final = (
    "with {h} off",
    "with {h} disabled",
    "{h}: no",
    "with {h} set to false",
    "{h} = false",
    "and make it not {h}",
    "it is not {h}",
    "with {h} turned off",
)
_ABOUT: Final = (
    "{s} the {t}.",
    "{S}s a {t}.",
    "{S} a {t}",
    "{S} the {t} in the system.",
    "Use this to {s} a {t}.",
    "{S} {t} by its parameters.",
    "Tool to {s} the {t}",
)


@dataclass(slots=True)
class _Wish:
    """A request for a made-up tool, as it grows parameter by parameter."""

    said: tuple[str, ...]
    thing: list[str]
    params: list[Param] = field(default_factory=list[Param])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    phrases: list[str] = field(default_factory=list[str])
    direct: str = ""  # a value that follows the object: "open the door 7"
    instead: str = ""  # a value that is the object: "water the fern"


def invented(src: Source, like: Ask | None = None) -> Ask:
    """A request for a tool with a made-up purpose. `like` makes it differ from another in the action or the object only."""
    stem, said = src.pick(ACTIONS) if src.chance(0.85) else (word := src.coined(1, 2), (word,))
    thing = [src.coined(1, 2) if src.chance(0.45) else src.pick(NOUNS)]
    if src.chance(0.35):
        thing.insert(0, src.word() if src.chance(0.5) else src.coined(1, 2))
    if like is not None and (old := like.topic.split(":"))[0] == "invented":
        if src.chance(0.5):
            thing = old[2].split()
        else:
            stem, said = next(((s, w) for s, w in ACTIONS if s == old[1]), (old[1], (old[1],)))
    name = identifier(src, [stem, *thing]) if src.chance(0.85) else identifier(src, [*thing, stem])
    human = " ".join(thing)
    wish = _Wish(said, thing)
    for index in range(src.weighted(((0, 0.04), (1, 4), (2, 4), (3, 2.5), (4, 1)))):
        key, kind = parameter_key(src)
        if all(param.name != key for param in wish.params):
            _add(src, wish, key, kind, is_first=index == 0)
    user = _request(src, wish)
    about = src.pick(_ABOUT).format(s=said[0] if src.chance(0.7) else stem, S=stem.capitalize(), t=human)
    tool = schema(src, name, about if src.chance(0.88) else "", wish.params)
    return Ask(tool, user, {"name": name, "arguments": wish.arguments}, f"invented:{stem}:{human}")


def _add(src: Source, wish: _Wish, key: str, kind: str, *, is_first: bool) -> None:
    """One more parameter, and unless it is left out, its value and how that is asked for."""
    param = Param(key, "flag" if kind == "bool" else kind, "", required=is_first or src.chance(0.6))
    spoken_key = spoken(key)
    if src.chance(0.7):
        param.about = src.pick(
            ("The {h}", "{H} of the {t}", "The {h} of the {t}", "{H}", "The {h} to use", "{H} for the {t}")
        ).format(h=spoken_key, H=spoken_key.capitalize(), t=" ".join(wish.thing))
    wish.params.append(param)
    if not param.required and src.chance(0.45):
        return
    if kind == "bool":
        value = src.chance(0.5)
        wish.phrases.append(src.pick(_YES if value else _NO).format(h=spoken_key))
    else:
        said, value = draw(src, kind)
        if is_first and src.chance(0.35):
            _say_first(src, wish, kind, said, value)
        else:
            wish.phrases.append(_phrase(src, key, said, value))
    wish.arguments[param.name] = value


def _say_first(src: Source, wish: _Wish, kind: str, said: str, value: Any) -> None:
    """The first value, beside the object or in its place: water_plant(plant) is asked for as "water the fern"."""
    if src.chance(0.35) and kind in ("word", "name", "phrase", "code"):
        param = wish.params[-1]
        param.name = key = wish.thing[-1]
        param.about = src.pick(("", f"Which {key}", f"The {key}", f"The {key} to {wish.said[0]}"))
        wish.instead = src.pick(("the {v}", "{v}", "the {v}")).format(v=said) if kind == "word" else said
    elif isinstance(value, str):
        wish.direct = src.pick((" {v}", " {v}", ' "{v}"', " for {v}", " of {v}")).format(v=said)
    else:
        wish.direct = " " + said


def _phrase(src: Source, key: str, said: str, value: Any) -> str:
    if key in _NATURAL and src.chance(0.55):
        return src.pick(_NATURAL[key]).format(v=said)
    if isinstance(value, (int, float)) and src.chance(0.3):
        return src.pick(
            ("with {v} {h}", "{v} {h}", "to a {h} of {v}", "a {h} of {v}", "to {h} {v}", "for {v} {h}")
        ).format(h=spoken(key), v=said)
    return src.pick(_BOTH).format(h=spoken(key), v=said)


def _request(src: Source, wish: _Wish) -> str:
    human, phrases = " ".join(wish.thing), wish.phrases
    user = f"{src.pick(wish.said)} {wish.instead or src.pick(('the ', 'the ', 'the ', 'a ', 'my ', '')) + human + wish.direct}"
    if phrases:
        glue = src.pick((", ", ", ", " and ", " "))
        user += src.pick((" ", ", ", " ")) + (
            glue.join(phrases) if len(phrases) < 3 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
        )
    opener = src.pick(("", "", "", "please ", "can you ", "I want you to ", "I need you to ", "could you ", "now "))
    user = opener + user
    is_question = opener in ("can you ", "could you ") and src.chance(0.7)
    return user[:1].upper() + user[1:] + ("?" if is_question else src.pick((".", ".", "", "!")))


def spoken(key: str) -> str:
    """A parameter's name as people say it."""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", key).replace("_", " ").replace("-", " ").lower()


def parameter_key(src: Source) -> tuple[str, str]:
    """A parameter name of this split and the kind of its value."""
    key, kinds = src.pick(_KEYS)
    kind = src.pick(re.findall(r"\S+", kinds))
    roll = src.rng.random()
    if kind.startswith("enum") and src.chance(0.6):
        kind = "enum:" + ",".join(dict.fromkeys(src.word() for _ in range(src.integer(2, 5))))
    if roll < 0.35:
        return key, kind
    if roll < 0.7:
        return identifier(src, [src.word(), key]), kind
    return (src.word() if roll < 0.9 else identifier(src, [src.word(), src.noun()])), kind
