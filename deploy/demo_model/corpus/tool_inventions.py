"""Invented tools: made-up actions, objects and parameters, and requests for them."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from .files import phrasings, table
from .tool_requests import Ask, Param, schema
from .tool_values import draw, identifier
from .words import NOUNS, Source

ACTIONS: Final[tuple[tuple[str, list[str]], ...]] = tuple(table("tool_inventions")["actions"].items())
_PARAMETERS: Final[tuple[tuple[str, list[str]], ...]] = tuple(table("tool_inventions")["parameters"].items())
# Phrases that state a value without naming its parameter.
_NATURAL: Final[dict[str, list[str]]] = table("tool_inventions")["natural"]
_BOTH: Final = phrasings("tool_inventions", "with_key")
_YES: Final = phrasings("tool_inventions", "yes")
_NO: Final = phrasings("tool_inventions", "no")
_ABOUT: Final = phrasings("tool_inventions", "about")


@dataclass(slots=True)
class _Wish:
    """Request for an invented tool, built parameter by parameter."""

    said: tuple[str, ...]
    thing: list[str]
    params: list[Param] = field(default_factory=list[Param])
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    phrases: list[str] = field(default_factory=list[str])
    direct: str = ""  # value after the object, as in "open the door 7"
    instead: str = ""  # value that replaces the object, as in "water the fern"


def invented(src: Source, like: Ask | None = None) -> Ask:
    """Return a request for an invented tool. With an invented tool in `like`, only the action or the object differs
    from it."""
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
    """Add a parameter to the tool. Unless it is left out of the request, also add its value and a phrase for it."""
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
    """Put the first value after the object or in its place: the request for water_plant(plant) is "water the fern"."""
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
    action = src.pick(wish.said)
    user = f"{action} {wish.instead or src.pick(('the ', 'the ', 'the ', 'a ', 'my ', '')) + human + wish.direct}"
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
    """Return a parameter's name as people say it."""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", key).replace("_", " ").replace("-", " ").lower()


def parameter_key(src: Source) -> tuple[str, str]:
    """Return a parameter name of this split, and the kind of its values."""
    key, kinds = src.pick(_PARAMETERS)
    kind = src.pick(kinds)
    roll = src.rng.random()
    if kind.startswith("enum") and src.chance(0.6):
        kind = "enum:" + ",".join(dict.fromkeys(src.word() for _ in range(src.integer(2, 5))))
    if roll < 0.35:
        return key, kind
    if roll < 0.7:
        return identifier(src, [src.word(), key]), kind
    return (src.word() if roll < 0.9 else identifier(src, [src.word(), src.noun()])), kind
