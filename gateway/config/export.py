"""The effective configuration as TOML or JSON with all defaults filled in, and the JSON schema of the file.

Everything is derived from the structs of `gateway.config.settings`, so that a new key appears automatically. The
comment above a field describes its key, in the schema and in docs/configuration.md.
"""

import ast
import inspect
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.config import settings
from gateway.config.settings import NOT_IN_FILE, Config, file_key

_UNITS_S: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_UNITS_BYTES: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DURATION_PATTERN: Final = r"^\s*\d+(\.\d+)?\s*(ms|s|m|min|h|d)?\s*$"
_SIZE_PATTERN: Final = r"^\s*\d+(\.\d+)?\s*([Bb]|[KkMmGgTt][Ii]?[Bb])?\s*$"


def to_toml(config: Config) -> str:
    """Format the effective configuration as TOML. Reading the TOML gives the same configuration."""
    import tomlkit  # The import is slow, and the web page imports this module when the daemon starts.

    return tomlkit.dumps(toml_value(config))


def to_json(config: Config) -> dict[str, object]:
    """Convert the effective configuration to JSON with the file's keys, sizes in bytes and durations in seconds."""
    return {
        "home": str(config.home),
        "file": str(config.config_path),
        **{name: _plain(getattr(config, name)) for name in _fields(Config)},
    }


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    (root,), components = msgspec.json.schema_components([Config], schema_hook=lambda _: {"type": "string"})
    texts = descriptions()
    # Structs of other modules are the content of other files.
    tables = {name: _file_spelling(table, texts[name]) for name, table in components.items() if name in texts}
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


def descriptions() -> dict[str, dict[str, str]]:
    """Return the descriptions of all keys, by struct and field: the comments above the fields in `settings.py`."""
    source = inspect.getsource(settings)
    lines = source.splitlines()
    return {
        struct.name: {
            field.target.id: _comment_above(lines, field.lineno)
            for field in struct.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for struct in ast.parse(source).body
        if isinstance(struct, ast.ClassDef)
    }


def _comment_above(lines: list[str], number: int) -> str:
    """Join the lines of the comment directly above line `number`; empty if there is none."""
    end = first = number - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(line.strip().removeprefix("#").strip() for line in lines[first:end])


def _fields(struct: type[Struct]) -> list[str]:
    return [name for name in struct.__struct_fields__ if name not in NOT_IN_FILE]


def toml_value(value: object, field: str = "") -> Any:
    """Convert a value for TOML. Durations and sizes become text in the largest unit that gives a whole number."""
    match value:
        case Struct():
            items = {file_key(name): toml_value(getattr(value, name), name) for name in _fields(type(value))}
            # TOML has no null, so None is written as a missing key. A missing table means an empty one.
            return {key: item for key, item in items.items() if item not in (None, {})}
        case dict():
            return {str(key): toml_value(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [toml_value(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case bool() | str() | None:
            return value
        case int() | float():
            units = _UNITS_S if field.endswith("_s") else _UNITS_BYTES if field.endswith("_bytes") else ()
            whole = ((unit, length) for unit, length in units if value >= length and value % length == 0)
            return next((f"{int(value // length)}{unit}" for unit, length in whole), value)
        case _:
            return str(value)


def _plain(value: object) -> object:
    match value:
        case Struct():
            return {file_key(name): _plain(getattr(value, name)) for name in _fields(type(value))}
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value


def _file_spelling(table: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Rename the properties of a schema object to the file's keys, where durations and sizes may be text, and describe
    them.
    """
    properties = {
        file_key(name): ({"description": texts[name]} if texts[name] else {}) | _accept_text(name, body)
        for name, body in table.get("properties", {}).items()
        if name not in NOT_IN_FILE
    }
    # The structs require fields that the file may omit.
    spelled = {key: value for key, value in table.items() if key not in ("required", "title")}
    return spelled | {"properties": properties}


def _accept_text(field: str, body: dict[str, Any]) -> dict[str, Any]:
    pattern = _DURATION_PATTERN if field.endswith("_s") else _SIZE_PATTERN if field.endswith("_bytes") else None
    if pattern is None:
        # The default of a table has the struct's names, and each of its keys has a default of its own.
        return {key: value for key, value in body.items() if key != "default"} if "$ref" in body else body
    rest = {key: value for key, value in body.items() if key == "default"}
    number = {key: value for key, value in body.items() if key != "default"}
    choices = [choice for choice in number.get("anyOf", [number]) if choice.get("type") != "null"]
    return {"anyOf": [*choices, {"type": "string", "pattern": pattern}], **rest}
