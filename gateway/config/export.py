"""The effective configuration as TOML or JSON with all defaults filled in, and the JSON schema of the file.

Everything is derived from the structs of `gateway.config.settings`, so that a new key appears automatically.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

import msgspec
from msgspec import NODEFAULT, Struct

from gateway.config.settings import NOT_IN_FILE, Config, file_key

_BARE_KEY: Final = re.compile(r"^[A-Za-z0-9_-]+$")
_UNITS_S: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_UNITS_BYTES: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DURATION_PATTERN: Final = r"^\s*\d+(\.\d+)?\s*(ms|s|m|min|h|d)?\s*$"
_SIZE_PATTERN: Final = r"^\s*\d+(\.\d+)?\s*([Bb]|[KkMmGgTt][Ii]?[Bb])?\s*$"


def to_toml(config: Config) -> str:
    """Format the effective configuration as TOML, which reads back as the same configuration."""
    tables: list[str] = []
    for name in _fields(Config):
        value = getattr(config, name)
        if isinstance(value, Struct):
            tables.extend(_tables((name,), value))
        else:
            tables.extend(text for key, body in value.items() for text in _tables((name, key), body))
    return "\n".join(tables)


def to_json(config: Config) -> dict[str, object]:
    """Convert the effective configuration to JSON with the file's keys, sizes in bytes and durations in seconds."""
    return {
        "home": str(config.home),
        "file": str(config.config_path),
        **{name: _plain(getattr(config, name)) for name in _fields(Config)},
    }


def keys_of(table: type[Struct]) -> Iterator[tuple[str, str]]:
    """Yield each key of a table and its default as the file would spell it; empty if no default can be written."""
    for field in msgspec.structs.fields(table):
        if field.name in NOT_IN_FILE:
            continue
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        is_written = default is not NODEFAULT and default is not None and not isinstance(default, Struct | dict)
        yield file_key(field.name), _literal(field.name, default) if is_written else ""


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    (root,), components = msgspec.json.schema_components([Config], schema_hook=lambda _: {"type": "string"})
    tables = {name: _file_spelling(table) for name, table in components.items()}
    top = tables.pop(root["$ref"].rpartition("/")[2])
    # The file and each of its tables are optional.
    for key in ("required", "description", "title"):
        top.pop(key, None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mlxd.toml",
        **top,
        "additionalProperties": False,
        "$defs": tables,
    }


def _fields(struct: type[Struct]) -> list[str]:
    return [name for name in struct.__struct_fields__ if name not in NOT_IN_FILE]


def _tables(path: tuple[str, ...], body: Struct) -> Iterator[str]:
    """Format the table of `body`, and the named tables inside of it."""
    yield _table(path, body)
    for name in _fields(type(body)):
        value: object = getattr(body, name)
        if _is_tables(value):
            for key, inner in value.items():
                yield from _tables((*path, name, key), inner)


def _table(path: tuple[str, ...], body: Struct) -> str:
    lines = [f"[{'.'.join(map(_key, path))}]"]
    for name in _fields(type(body)):
        value = getattr(body, name)
        # TOML has no null; a missing key means the same.
        if value is not None and not _is_blank(value) and not _is_tables(value):
            lines.append(f"{_key(file_key(name))} = {_literal(name, value)}")
    return "\n".join(lines) + "\n"


def _is_tables(value: object) -> TypeGuard[dict[str, Struct]]:
    """Whether a value holds named tables, which are written below their own; a map of plain values is one value."""
    return isinstance(value, dict) and all(isinstance(inner, Struct) for inner in value.values())  # pyright: ignore[reportUnknownVariableType]


def _is_blank(value: object) -> bool:
    """Whether a value is a nested table with nothing set."""
    return isinstance(value, Struct) and all(getattr(value, name) is None for name in value.__struct_fields__)


def _literal(field: str, value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return _number(field, value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_literal('', item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
        case Struct():
            items = ((name, getattr(value, name)) for name in _fields(type(value)))
            inner = ", ".join(f"{file_key(name)} = {_literal(name, item)}" for name, item in items if item is not None)
            return f"{{ {inner} }}"
        case dict():
            pairs = (f"{_key(str(key))} = {_literal('', item)}" for key, item in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return f"{{ {', '.join(pairs)} }}"
        case _:
            return _string(str(value))


def _number(field: str, value: float) -> str:
    units = _UNITS_S if field.endswith("_s") else _UNITS_BYTES if field.endswith("_bytes") else ()
    for unit, length in units:
        if value >= length and value % length == 0:
            return f'"{int(value // length)}{unit}"'
    return repr(value)


def _key(name: str) -> str:
    return name if _BARE_KEY.match(name) else _string(name)


def _string(text: str) -> str:
    # JSON strings are TOML basic strings, except for this one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(value: object) -> object:
    match value:
        case Struct():
            return {file_key(name): _plain(getattr(value, name)) for name in _fields(type(value))}
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value


def _file_spelling(table: dict[str, Any]) -> dict[str, Any]:
    """Rename the properties of a schema object to the file's keys, where durations and sizes may be text."""
    properties = {
        file_key(name): _accept_text(name, body)
        for name, body in table.get("properties", {}).items()
        if name not in NOT_IN_FILE
    }
    # The structs require fields that the file may omit.
    spelled = {key: value for key, value in table.items() if key not in ("required", "title")}
    return spelled | {"properties": properties}


def _accept_text(field: str, body: dict[str, Any]) -> dict[str, Any]:
    pattern = _DURATION_PATTERN if field.endswith("_s") else _SIZE_PATTERN if field.endswith("_bytes") else None
    if pattern is None:
        return body
    rest = {key: value for key, value in body.items() if key == "default"}
    number = {key: value for key, value in body.items() if key != "default"}
    choices = [choice for choice in number.get("anyOf", [number]) if choice.get("type") != "null"]
    return {"anyOf": [*choices, {"type": "string", "pattern": pattern}], **rest}
