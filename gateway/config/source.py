"""Reads tables of a TOML file into structs. Errors have the line of the wrong key.

Line numbers of the keys in a TOML file, and readable durations and sizes. `tomllib` provides neither.

Keys and tables that the configuration file had in earlier versions, each with what holds instead.
"""

import difflib
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from gateway.config.settings import NOT_IN_FILE, Config, ConfigError, file_key
from protocol.spec import IMAGE_PIXELS_MAX

_PART: Final = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_DOTTED: Final = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER: Final = re.compile(rf"^\s*\[\[?\s*(?P<keys>{_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_ASSIGN: Final = re.compile(rf"^\s*(?P<keys>{_DOTTED})\s*=")
_KEY: Final = re.compile(_PART)
_INLINE: Final = re.compile(rf"(?P<key>{_PART})\s*=(?!=)")
_AT_LINE: Final = re.compile(r"\s*\(at line (\d+), column \d+\)$")
_NUMBER_UNIT: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES_BINARY: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_duration(text: str) -> float:
    """Parse `30s`, `5m`, `1.5h`, `250ms`, `2d`, or plain seconds. Raises `ValueError`."""
    match = _NUMBER_UNIT.match(text)
    unit = _SECONDS.get((match[2] or "s").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a duration; write it like 30s, 5m or 2h")
    return float(match[1]) * unit


def parse_size(text: str) -> int:
    """Parse `32MiB`, `8GB`, or plain bytes. Raises `ValueError`."""
    match = _NUMBER_UNIT.match(text)
    unit = (_BYTES | _BYTES_BINARY).get((match[2] or "b").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 512KiB, 32MiB or 8GiB")
    return int(float(match[1]) * unit)


def control_character(text: str) -> str:
    """Return the first control character or line separator of a text as `U+000A`; empty if there is none."""
    found = next((char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")), None)
    return "" if found is None else f"U+{ord(found):04X}"


class Locator:
    """Finds the lines of keys in a TOML text. It serves for error messages; multi-line strings may mislead it."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.match(line):
                table = _keys(header["keys"])
                self._add(table, number)
            elif assign := _ASSIGN.match(line):
                key = (*table, *_keys(assign["keys"]))
                self._add(key, number)
                for inline in _INLINE.finditer(line, assign.end()):
                    self._add((*key, *_keys(inline["key"])), number)

    def _add(self, key: tuple[str, ...], number: int) -> None:
        for length in range(1, len(key) + 1):
            self._lines.setdefault(key[:length], number)

    def line(self, *spellings: tuple[str, ...]) -> int | None:
        """Return the line of the first of `spellings` that exists, or else of the nearest table around the last."""
        for key in spellings:
            if key in self._lines:
                return self._lines[key]
        key = spellings[-1]
        while key and key not in self._lines:
            key = key[:-1]
        return self._lines.get(key)

    @staticmethod
    def syntax_error(error: tomllib.TOMLDecodeError) -> tuple[str, int | None]:
        """Split an error message of `tomllib` into the error and its line."""
        text = str(error)
        match = _AT_LINE.search(text)
        return (text[: match.start()], int(match[1])) if match else (text, None)


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in _KEY.findall(dotted))


_NO_AGENTS: Final = (
    "ranks on other machines are started over ssh, and there are no agents and no keys of nodes any more: take it out, "
    "and name a host file; see docs/groups.md"
)
# Spelled as in the file. NAME stands for a name that the file's author chooses.
REMOVED: Final = {
    "node": _NO_AGENTS,
    "nodes": _NO_AGENTS,
    "peers": "a daemon serves the models of its own machine: put a router in front of the daemons; see docs/fleet.md",
    "server.log_format": "stderr gets text if it is a terminal, and JSON otherwise",
    "server.log_max": "a log file has at most 16 MiB",
    "server.log_keep": "8 older log files are kept",
    "server.usage_months": "usage is kept for 13 months",
    "server.queue_share": (
        "while there are other keys, a key may fill half of a model's queue; "
        "mlxctl keys set NAME --queue-share changes this for one key"
    ),
    "server.response_store_age": "a stored response that is not used for 30 days is deleted",
    "server.unauthorized_rpm": "an address may send 300 requests without a valid key a minute",
    "server.max_connections_per_address": (
        "one address may have half of all connections; those in trusted_proxies may have all"
    ),
    "server.max_connections": (
        "the limit of open files (ulimit -n), less a reserve, is the limit of connections; see docs/operations.md"
    ),
    "server.node": "mlxd sends no header x-mlxd-node; a proxy in front of it can add one; see docs/fleet.md",
    "server.log_file": (
        "the log is always written to logs/mlxd.log in the home; mlxctl logs -f prints it; stderr gets all of it on a "
        "terminal, else starts, reloads and the end of the daemon"
    ),
    "server.time_zone": (
        "the days and months of budgets and usage are those of the machine's time zone, which the environment variable "
        "TZ changes"
    ),
    "server.metrics_compat": "GET /metrics?names=vllm has vLLM's names too; see docs/monitoring.md",
    "server.body_memory": "the bodies of all requests together have a 64th of the machine's memory, at least 256 MiB",
    "server.response_journal": (
        "the journals of running background responses have at most 256 MiB; response_store = 0 writes none"
    ),
    "server.write_timeout": "a client that reads nothing of its answer for 30 seconds is disconnected",
    "server.capture_max": "captured requests take at most 64 MiB of the disk",
    "server.capture_age": "a captured request is deleted after one day",
    "media.max_pixels": f"an image has at most {IMAGE_PIXELS_MAX:,} pixels",
    "media.in_flight": "the media of all requests together have at most 512 MiB",
    "media.fetch_timeout": "the URLs of a request are fetched within 10 seconds",
    "audio": (
        "a file to transcribe has at most max_size of [media] and lasts at most 2 hours; a text to speak has at most "
        "4,096 characters, and its speech lasts at most 15 minutes"
    ),
    "memory.min_residency": "a loaded model stays at least 10 seconds",
    "media.max_count": "a request has at most 64 images, videos, audio clips and PDFs",
    "upstreams.NAME.first_byte": "an answer must begin within 5 minutes",
    "upstreams.NAME.silence": "a pause within an answer may last 5 minutes",
    "upstreams.NAME.ca": (
        "the environment variable SSL_CERT_FILE of the daemon names the file of authorities; see docs/upstreams.md"
    ),
    "batches.age": "files and ended batches are deleted after 30 days; a file may have an expires_after of its own",
    "models.NAME.max_waiting": "1,024 requests may wait beyond max_running; the next one gets a 429",
    "models.NAME.prefill_chunk": "a step has at most 512 tokens of a prompt",
    "models.NAME.batching": "the self-check of each load chooses the fastest exact batch mode; see docs/models.md",
    "models.NAME.load_timeout": "a load may take 10 minutes, and a second more for each 50 MB of the weights",
    "models.NAME.log_level": "workers have the log level of [server]",
    "models.NAME.expert_cache": "a quarter of the experts on disk is cached in memory; see docs/experts.md",
    "models.NAME.sparse_prefill.keep": "the part of a long prompt to compute is the value itself: sparse_prefill = 0.5",
    "models.NAME.sparse_prefill.from_tokens": (
        "prompts of fewer than 8,192 tokens are computed in full, unless the request names the part to compute"
    ),
    "models.NAME.kv_events.endpoint": 'the address is the value itself: kv_events = "tcp://127.0.0.1:5557"',
    "models.NAME.kv_events.replay": "missed events are replayed at the port after that of the events",
    "models.NAME.kv_events.topic": "the topic is kv@HOST@MODEL, with the name of this machine; see docs/fleet.md",
    "models.NAME.kv_events.plain": "an address that other machines can reach is allowed, with a warning in the log",
    "models.NAME.group.split": "the layers are divided as evenly as possible",
    "models.NAME.group.python": "the interpreter on the other machines has the same path as on this one",
    "models.NAME.cache.disk_min_tokens": "prefixes of fewer than 512 tokens are not written to the disk",
}
# Tables whose tables have names that the file's author chooses.
_NAMED: Final = ("models", "upstreams")


def what_holds_now(where: tuple[str, ...]) -> str:
    """Return what holds instead of a removed key or table at this place of the file; empty if none was there."""
    if len(where) > 1 and where[0] in _NAMED:
        where = (where[0], "NAME", *where[2:])
    path = ".".join(where)
    # A key may be spelled with its unit.
    return REMOVED.get(path) or REMOVED.get(path.removesuffix("_s")) or REMOVED.get(path.removesuffix("_bytes"), "")


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

    def _refuse_removed(self, table: dict[str, Any], where: tuple[str, ...]) -> None:
        """Refuse the first removed key of a table that is no table any more."""
        for key in table:
            if now := what_holds_now((*where, key)):
                raise self.error(f"{key} is gone: {now}", (*where, key))

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
            if isinstance(value, dict) and not is_table:
                self._refuse_removed(cast(dict[str, Any], value), at)
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
