"""Reads tables of a TOML file into structs. Errors have the line of the wrong key."""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from gateway.config.removed import what_holds_now
from gateway.config.settings import NOT_IN_FILE, Config, ConfigError, file_key
from gateway.config.syntax import Locator, control_character, parse_duration, parse_size

T = TypeVar("T", bound=Struct)

# Keys whose values may have several lines.
_FREE_TEXTS: Final = frozenset({"chat_template"})


class ConfigSource:
    """One configuration file: its path, and the line of each key after the file was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locator = Locator("")

    def read(self, *, required: bool) -> dict[str, Any]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if required:
                raise ConfigError("no such file", self.path) from None
            return {}
        except UnicodeDecodeError as error:
            raise ConfigError(f"not UTF-8 text ({error.reason} at byte {error.start})", self.path) from None
        except OSError as error:
            raise ConfigError(error.strerror or str(error), self.path) from None
        self._locator = Locator(text)
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message, line = self._locator.syntax_error(error)
            raise ConfigError(message, self.path, line) from None
        self._refuse_controls(tables, ())
        return tables

    def _refuse_controls(self, value: Any, where: tuple[str, ...]) -> None:
        """Refuse control characters in all names and values but free texts: no path, host or address has any."""
        if isinstance(value, dict):
            table = cast(dict[str, Any], value)
            for key, inner in table.items():
                self._refuse_controls(key, where)
                if key not in _FREE_TEXTS:
                    self._refuse_controls(inner, (*where, key))
        elif isinstance(value, list):
            for inner in cast(list[Any], value):
                self._refuse_controls(inner, where)
        elif isinstance(value, str) and (control := control_character(value)):
            raise self.error(f"{where[-1] if where else value!r}: has the control character {control}", where)

    def line(self, key: tuple[str, ...]) -> int | None:
        return self._locator.line(key)

    def error(self, message: str, key: tuple[str, ...]) -> ConfigError:
        return ConfigError(message, self.path, self.line(key))

    def refuse_unknown(self, table: dict[str, Any], known: tuple[str, ...], where: tuple[str, ...]) -> None:
        for key in table:
            if key in known:
                continue
            if now := what_holds_now((*where, key)):
                raise self.error(f"{key if where else f'[{key}]'} is gone: {now}", (*where, key))
            inside = f" in [{'.'.join(where)}]" if where else ""
            raise self.error(f"unknown key {key!r}{inside}; {_hint(key, known)}", (*where, key))

    def struct(self, raw: Any, struct: type[T], where: tuple[str, ...]) -> T:
        """Read a table as a struct. Raises `ConfigError`."""
        return self.convert(self.table(raw, struct, where), struct, where)

    def table(self, raw: Any, struct: type[Struct], where: tuple[str, ...]) -> dict[str, Any]:
        """Rename the keys of `raw`, and of its inner tables, to the fields of `struct`. Durations and sizes become
        numbers.
        """
        if not isinstance(raw, dict):
            raise self.error(f"{'.'.join(where)} must be a table", where)
        types = {field.name: field.type for field in fields(struct) if field.name not in NOT_IN_FILE}
        names = {file_key(name): name for name in types} | {name: name for name in types}
        self.refuse_unknown(raw, tuple(names), where)
        table: dict[str, Any] = {}
        for key, value in raw.items():
            field = names[key]
            if field in table:
                raise self.error(f"{file_key(field)!r} is given twice", (*where, key))
            inner, at = types[field], (*where, key)
            is_table = _is_struct(inner) and isinstance(value, dict)
            table[field] = self.table(value, inner, at) if is_table else self._value(field, value, at)
        return table

    def _value(self, field: str, value: Any, where: tuple[str, ...]) -> Any:
        if field == "log_level" and isinstance(value, str):
            return value.lower()
        parse: Callable[[str], float] | None = None
        if field.endswith("_s"):
            parse = parse_duration
        elif field.endswith("_bytes"):
            parse = parse_size
        if parse is None or not isinstance(value, str) or value == "auto":
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise self.error(f"{where[-1]}: {error}", where) from None

    def convert(
        self, table: dict[str, Any], struct: type[T], where: tuple[str, ...], overridden: frozenset[str] = frozenset()
    ) -> T:
        """Check types and ranges. Raises `ConfigError` with the line of the wrong value."""
        try:
            return msgspec.convert(table, struct)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            field = place.rstrip("`").partition("[")[0]
            key = tuple(field.split("."))
            what = _sentence(what) + (_choices(struct, key) if what.startswith("Invalid enum value") else "")
            if key[0] in overridden:
                raise ConfigError(f"--{key[0].replace('_', '-')}: {what}") from None
            line = self._locator.line((*where, *key[:-1], file_key(key[-1])), (*where, *key))
            raise ConfigError(f"{file_key(field)}: {what}", self.path, line) from None

    def path_of(self, path: str) -> Path:
        """Resolve a path from the configuration file, relative to the folder of that file."""
        return self.path.absolute().parent / Path(path).expanduser()

    def text(self, path: str, where: tuple[str, ...]) -> str:
        """Read the text file at a path from the configuration file. Raises `ConfigError`."""
        file = self.path_of(path)
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise self.error(f"{where[-1]}: cannot read {file}: {reason}", where) from None

    def model_path(self, path: Any) -> Any:
        """Resolve a model's folder, relative to the folder of the configuration file. A repository id stays as it
        is."""
        if not isinstance(path, str):
            return path
        if path.startswith("~"):
            return str(Path(path).expanduser())
        if path in (".", "..") or path.startswith(("./", "../")):
            return os.path.normpath(self.path.absolute().parent / path)
        return path


def _is_struct(kind: Any) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _all_tables(struct: type[Struct] = Config, prefix: str = "") -> Iterator[tuple[str, type[Struct]]]:
    """Yield each table that the file may have, with its struct. NAME stands for a name that the file's
    author chooses.
    """
    for field in fields(struct):
        name, kind = f"{prefix}{field.name}", field.type
        if get_origin(kind) is dict and not prefix:
            name, kind = f"{name}.NAME", get_args(kind)[1]
        if _is_struct(kind):
            yield name, kind
            yield from _all_tables(kind, f"{name}.")


def _hint(key: str, known: tuple[str, ...]) -> str:
    """Suggest the key that was probably meant by an unknown one."""
    homes = [
        f"[{table}]"
        for table, struct in _all_tables()
        if key not in NOT_IN_FILE and key in (*struct.__struct_fields__, *map(file_key, struct.__struct_fields__))
    ]
    if homes:
        return f"it belongs in {' or '.join(homes)}"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"


def _choices(struct: type[Struct], key: tuple[str, ...]) -> str:
    """List the values of a field that has a choice of names, as the end of a sentence; empty for other fields."""
    kind: Any = struct
    for name in key:
        kind = next((each.type for each in fields(kind) if each.name == name), None) if _is_struct(kind) else None
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind)
    values = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    return f"; one of {', '.join(values)}" if values else ""


def _sentence(what: str) -> str:
    return what.replace("`", "").replace("Expected", "expected").replace("Invalid enum value", "unknown value")
