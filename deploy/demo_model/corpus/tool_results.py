"""Results of tools, and answers that report them."""

import json
from typing import Any, Final

from .files import word_list
from .words import Source

_RESULT_KEYS: Final = word_list("result_keys")


Told = tuple[str, str, tuple[str, ...]]


def result(src: Source) -> Told:
    """Return a tool's result, the sentence that reports it, and the words that this sentence must contain."""
    return src.weighted(((_object, 6), (_text, 3), (_number, 1.2), (_list, 1), (_objects, 0.7), (_error, 1)))(src)


def _text(src: Source) -> Told:
    text = src.pick(
        (
            src.sentence(),
            f"{src.word().capitalize()}, {src.integer(-10, 40)} degrees",
            f"{src.word()} {src.code()} {src.word()}",
            src.paragraph(2),
            f"{src.word().capitalize()} {src.noun()}: {src.number()}",
        )
    )
    said = text if text[-1] in ".!?" else text + "."
    return text, said[:1].upper() + said[1:], (text.rstrip(".!?"),)


def _number(src: Source) -> Told:
    value = src.pick((src.number(), src.decimal(), -src.integer(1, 40)))
    return str(value), f"The result is {value}.", (str(value),)


def _error(src: Source) -> Told:
    reason = src.pick(
        (
            f"{src.noun()} not found",
            "permission denied",
            "timeout",
            f"unknown {src.noun()}",
            f"invalid {src.word()}",
            f"{src.word()} is not available",
        )
    )
    raw = src.pick(
        (json.dumps({"error": reason}), f"Error: {reason}", json.dumps({"status": "error", "message": reason}))
    )
    return raw, f"The tool reported an error: {reason}.", (reason,)


def _list(src: Source) -> Told:
    items = src.words(2, 5)
    said = ", ".join(items[:-1]) + " and " + items[-1]
    if src.chance(0.4):
        return json.dumps(items), f"The results are {said}.", tuple(items)
    key = src.pick(("items", "results", "names", "files", "options"))
    return json.dumps({key: items}), f"The {key} are {said}.", tuple(items)


def _objects(src: Source) -> Told:
    keys = src.sample(_RESULT_KEYS[:30], 2)
    rows = [{k: _value(src, k) for k in keys} for _ in range(src.integer(2, 3))]
    raw = rows if src.chance(0.5) else {"results": rows}
    said = "; ".join(", ".join(f"{k} {v}" for k, v in row.items()) for row in rows)
    return (
        json.dumps(raw, ensure_ascii=False),
        f"I found {len(rows)} results: {said}.",
        tuple(str(v) for row in rows for v in row.values()),
    )


def _object(src: Source) -> Told:
    keys = [
        src.pick(_RESULT_KEYS) if src.chance(0.75) else src.word() if src.chance(0.5) else f"{src.word()}_{src.noun()}"
        for _ in range(src.integer(1, 5))
    ]
    record = {key: _value(src, key) for key in dict.fromkeys(keys)}
    parts = [_told(key, value) for key, value in record.items()]
    said = (", ".join(parts[:-1]) + " and " if len(parts) > 1 else "") + parts[-1] + "."
    shown: Any = record if src.chance(0.88) else {src.pick(("result", "data", "output")): record}
    return (
        json.dumps(shown, ensure_ascii=False, indent=2 if src.chance(0.08) else None),
        said[:1].upper() + said[1:],
        tuple(str(v) for v in record.values() if not isinstance(v, bool)),
    )


def _told(key: str, value: Any) -> str:
    human = key.replace("_", " ")
    if isinstance(value, bool):
        return f"{human} is {'true' if value else 'false'}"
    return f"the {human} is {value}"


_NUMBERS: Final = frozenset(word_list("result_keys_of_numbers"))


def _value(src: Source, key: str) -> Any:
    if key in ("available", "success", "sent", "confirmed"):
        return src.chance(0.5)
    if key == "count":
        return src.number()
    if key in _NUMBERS:
        return src.pick((src.number(), src.number(), src.decimal(), -src.integer(1, 30)))
    return src.pick(
        (
            src.word(),
            src.word(),
            src.name(),
            src.city(),
            src.code(),
            " ".join(src.words(2, 3)),
            src.time(),
            src.date(),
            src.number(),
        )
    )
