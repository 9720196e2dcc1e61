"""The tables of keys in docs/configuration.md: `python -m tests.docs.config_page` writes them from the settings.

A table stands between the lines `<!--keys:NAME-->` and `<!--end-->`, where NAME is a table of the file. A table
without such a place is a part of the table around it. Everything else on the page is written by hand.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import tomlkit
from msgspec import NODEFAULT, Meta, Struct, structs
from msgspec.structs import FieldInfo, fields

from gateway.config.export import descriptions, toml_value
from gateway.config.settings import NOT_IN_FILE, Config, ModelConfig, Seconds, ServerConfig, file_key
from gateway.config.worker_spec_and_group import loads_alike, worker_spec
from gateway.reload import FIXED
from tests.support.daemon import ROOT

PAGE: Final = ROOT / "docs" / "configuration.md"
_PLACE: Final = re.compile(r"(<!--keys:(\S+)-->\n).*?(<!--end-->)", re.DOTALL)
# The comment of a field may end with the page or the section that has more.
_MORE: Final = re.compile(r" See docs/([\w-]+\.md)(#[\w-]+)?\.$")
_WORDS: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}
# Values of all types. Every field has another value than at least one of them.
_OTHERS: Final = (True, False, 7, 0, "other", ("local", "local"), {"other": "folder"}, None)


def page() -> str:
    """Return the page with new tables. Raises `LookupError` if it has a place for a table that the settings lack."""
    text = PAGE.read_text()
    known = dict(tables_in(Config))
    places = [place for _, place, _ in _PLACE.findall(text)]
    if gone := [place for place in places if place not in known]:
        raise LookupError(f"{PAGE} has a place for {gone}, which settings.py lacks: remove it")
    return _PLACE.sub(lambda match: f"{match[1]}{_table(match[2], known[match[2]], places)}{match[3]}", text)


def keys(struct: type[Struct]) -> list[FieldInfo]:
    """Return the fields of a struct that are keys of the file."""
    return [field for field in fields(struct) if field.name not in NOT_IN_FILE]


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def tables_in(struct: type[Struct], prefix: str = "") -> Iterator[tuple[str, type[Struct]]]:
    """Yield each table of the file with its struct. NAME stands for the name of a model or an upstream."""
    for field in keys(struct):
        name, kind = f"{prefix}{field.name}", field.type
        if get_origin(kind) is dict and not prefix:
            name, kind = f"{name}.NAME", get_args(kind)[1]
        if is_table(kind):
            yield name, kind
            yield from tables_in(kind, f"{name}.")


def _table(name: str, struct: type[Struct], places: list[str]) -> str:
    rows = ["| key | value | meaning |", "|---|---|---|", *_rows(name, struct, places, "")]
    return "".join(f"{row}\n" for row in rows)


def _rows(name: str, struct: type[Struct], places: list[str], prefix: str) -> Iterator[str]:
    texts = descriptions()[struct.__name__]
    for field in keys(struct):
        path, key = f"{name}.{field.name}", f"`{prefix}{file_key(field.name)}`"
        if is_table(field.type) and path not in places:
            yield from _rows(path, field.type, places, f"{prefix}{field.name}.")
            continue
        text = texts[field.name]
        if more := _MORE.search(text):
            other = "" if more[1] == PAGE.name else more[1]
            text, key = text[: more.start()], f"[{key}]({other}{more[2] or ''})"
        # A table with a place of its own has its mark in the row of the table around it.
        mark = "" if name in places and "." in name.removesuffix(".NAME") else _mark(path, field.type)
        yield f"| {key}{mark} | {_value(field)} | {text} |"


def _value(field: FieldInfo) -> str:
    """Describe the values of a field, its default first as the file has it. If a missing key stands for the default,
    there are only types, or `one of` some values.
    """
    choices = list(_choices(field.type, field.name))
    values, types = ([each for each in choices if (each[0] == "`") is is_value] for is_value in (True, False))
    default = field.default if field.default_factory is NODEFAULT else field.default_factory()
    if default is not NODEFAULT and default is not None and not isinstance(default, Struct | dict):
        first = _code(default, field.name)
        if first in values:
            values.remove(first)
        else:
            _, space, bounds = types.pop(0).partition(" ")
            first += space + bounds
        values.insert(0, first)
    elif not types:
        values[0] = f"one of {values[0]}"
    return " or ".join(filter(None, (", ".join(values), *types)))


def _choices(kind: Any, field: str) -> Iterator[str]:
    """Yield each value, or type with its bounds, that a field may have. None stands for a missing key."""
    arguments = get_args(kind)
    if kind == Seconds:
        yield "duration"
    elif get_origin(kind) is Annotated:
        yield "".join(_choices(arguments[0], field)) + _bounds(arguments[1], field)
    elif get_origin(kind) is Literal:
        yield from (_code(value, "") for value in arguments)
    elif get_origin(kind) is tuple:
        yield "list"
    elif is_table(kind) or get_origin(kind) is dict:
        yield "table"
    elif arguments:
        yield from (choice for each in arguments if each is not type(None) for choice in _choices(each, field))
    elif kind in (int, float) and field.endswith("_s"):
        yield "duration"
    else:
        yield "size" if field.endswith("_bytes") else _WORDS[kind]


def _bounds(meta: Meta, field: str) -> str:
    """Return the bounds that are not obvious: those of both sides, and of a length."""
    if meta.max_length is not None:
        return f" (at most {meta.max_length})"
    low = meta.ge if meta.ge is not None else meta.gt
    # Larger bounds only keep a number in 64 bits.
    if low is None or meta.le is None or (meta.le >= 1 << 40 and not field.endswith("_bytes")):
        return ""
    first, last = (str(toml_value(bound, field)).removesuffix(".0") for bound in (low, meta.le))
    return f" ({'above ' if meta.ge is None else ''}{first} to {last})"


def _code(value: object, field: str) -> str:
    return f"`{tomlkit.item(toml_value(value, field)).as_string()}`"


def _mark(path: str, kind: Any) -> str:
    """Return how a reload applies another value of a key: † only by a restart of the daemon, ↻ by one of the model."""
    if path.startswith("server.") and path.split(".")[1] in FIXED:
        return "†"
    if is_table(kind):
        return max(_mark(f"{path}.{field.name}", field.type) for field in keys(kind))
    return "↻" if any(_restarts(path.replace("NAME", "m").split("."), value) for value in _OTHERS) else ""


def _restarts(path: list[str], value: object) -> bool:
    """Whether a reload with another value of a field restarts a loaded model."""
    model = ModelConfig(name="m", path="m")
    old = Config(home=Path("/h"), server=ServerConfig(), models={"m": model}, config_path=Path("/h/mlxd.toml"))
    try:
        new = _replaced(old, path, value)
        return not loads_alike(*(worker_spec(each, each.models["m"]) for each in (old, new)))
    except (AttributeError, LookupError, TypeError, ValueError):
        return False  # The field has no such value.


def _replaced(owner: Any, path: list[str], value: object) -> Any:
    """Return a copy of a struct or dict with another value at a path."""
    name, *rest = path
    if isinstance(owner, dict):
        return owner | {name: _replaced(owner[name], rest, value) if rest else value}
    return structs.replace(owner, **{name: _replaced(getattr(owner, name), rest, value) if rest else value})


if __name__ == "__main__":
    PAGE.write_text(page())
