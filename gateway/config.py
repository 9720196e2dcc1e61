"""The configuration file: TOML in, frozen structs out. What is wrong in it is a `ConfigError` that names the line."""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.configtext import Locator, parse_duration, parse_size
from gateway.hfcache import cached_models
from gateway.keys import KeyFile, KeysUnusable
from gateway.origins import bad_origin, is_loopback
from gateway.parsers import bad_parser

DEFAULT_HOME: Final = "~/.mlxd"
CONFIG_NAME: Final = "mlxd.toml"
# A name travels in argv and in a ZeroMQ routing id, which holds 255 bytes with its epoch.
NAME_BYTES_MAX: Final = 200

T = TypeVar("T", bound=Struct)

Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class ConfigError(ValueError):
    """The configuration cannot be used. `str()` is a sentence for the operator, with file and line when known."""

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)
        self.path = path
        self.line = line


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. In the file `_s` and `_bytes` may be left out of a key: `drain = "30s"`, `max_body = "32MiB"`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    log_level: LogLevel = "info"
    # In `home/logs`; this many older files of this size are kept.
    log_file: bool = True
    log_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 16 * 1024 * 1024
    log_keep: Annotated[int, Meta(ge=0, le=1000)] = 8
    drain_s: Seconds = 30.0
    write_timeout_s: Seconds = 30.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 32 * 1024 * 1024
    request_timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 600.0
    # Of the Responses API, for clients that come back to an answer; 0 bytes keeps none.
    response_store_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    response_store_age_s: Seconds = 30 * 86400.0
    cors: tuple[str, ...] = ()
    metrics_auth: bool = False
    # A request that takes longer is warned of, with where its time went; 0 warns of none.
    slow_request_s: Seconds = 30.0
    # The newest requests, with all that was asked and answered, kept in `home/captures` for debugging; 0 keeps none.
    capture: Annotated[int, Meta(ge=0, le=10_000)] = 0
    capture_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 64 * 1024 * 1024
    capture_age_s: Seconds = 86400.0
    # Where traces go, as OTLP over HTTP; empty makes none.
    otlp_endpoint: str = ""


class SamplingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request of this model uses where it is silent; None leaves the API's own default."""

    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`cache` of a model: bytes of prefix cache in memory and on disk; 0 is off, None a share of the machine's memory.

    On disk all models share one folder, whose cap is the largest that any of them names.
    """

    ram_bytes: Annotated[int, Meta(ge=0)] | None = None
    disk_bytes: Annotated[int, Meta(ge=0)] = 10 * 1024**3


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`. `path`: a folder, a Hugging Face repository in the local cache, or `demo`; default: the name."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    context: Annotated[int, Meta(ge=0)] = 0
    max_running: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    prefill_chunk: Annotated[int, Meta(ge=16, le=65536)] = 512
    load_timeout_s: Seconds = 600.0
    sampling: SamplingDefaults = SamplingDefaults()
    trust_remote_code: bool = False
    # Which family's reasoning and tool calls the model writes; empty is by its template and vocabulary.
    parser: str = ""
    cache: CacheConfig = CacheConfig()
    # Bytes of KV for running requests; None is half of the memory that is free once the weights are in.
    kv_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Of its worker; None is the server's.
    log_level: LogLevel | None = None


class Config(Struct, frozen=True):
    """All of it, checked. `models` keeps the order of the file."""

    home: Path
    server: ServerConfig
    models: dict[str, ModelConfig]
    config_path: Path

    @property
    def run_dir(self) -> Path:
        return self.home / "run"

    @property
    def prefix_cache_dir(self) -> Path:
        return self.home / "cache" / "prefix"

    @property
    def prefix_cache_bytes(self) -> int:
        """The cap of the folder that all models share."""
        return max((model.cache.disk_bytes for model in self.models.values()), default=0)

    @property
    def log_dir(self) -> Path:
        return self.home / "logs"

    @property
    def log_path(self) -> Path:
        return log_path(self.home)

    @property
    def keys_path(self) -> Path:
        return keys_path(self.home)

    @property
    def capture_dir(self) -> Path:
        return self.home / "captures"

    @property
    def usage_path(self) -> Path:
        return self.home / "state" / "usage.json"

    @property
    def store_path(self) -> Path:
        return self.home / "state" / "responses.sqlite"

    @property
    def admin_socket(self) -> Path:
        return self.run_dir / "admin.sock"


def default_home(environ: Mapping[str, str] = os.environ) -> Path:
    """`MLXD_HOME`, or `~/.mlxd`."""
    return Path(environ.get("MLXD_HOME") or DEFAULT_HOME).expanduser().absolute()


def keys_path(home: Path) -> Path:
    """Where the API keys of a home are."""
    return home / "keys" / "keys.json"


def log_path(home: Path) -> Path:
    """The log file of a home; older ones are beside it."""
    return home / "logs" / "mlxd.log"


def load_config(
    home: Path,
    path: Path | None = None,
    *,
    host: str | None = None,
    port: int | None = None,
    log_level: str | None = None,
) -> Config:
    """Read `path` (default: `home/mlxd.toml`, which may be absent) and apply the command line's overrides.

    Raises `ConfigError`. Without any model configured: `demo`, and every model that the Hugging Face cache holds.
    """
    source = _Source(path or home / CONFIG_NAME)
    raw = source.read(required=path is not None)
    source.refuse_unknown(raw, ("server", "models"), ())
    overrides = {"host": host, "port": port, "log_level": log_level}
    server = _server(source, raw.get("server", {}), {k: v for k, v in overrides.items() if v is not None})
    if not is_loopback(server.host):
        _need_keys(source, home, server.host, is_override=host is not None)
    models = _models(source, raw.get("models", {})) or _found_models()
    _refuse_duplicates(source, models)
    return Config(home=home, server=server, models=models, config_path=source.path)


# -- tables ----------------------------------------------------------------------------------------------------------


def _server(source: "_Source", raw: Any, overrides: dict[str, Any]) -> ServerConfig:
    table = source.table(raw, ServerConfig, ("server",))
    for key, value in overrides.items():
        table[key] = value
    if isinstance(table.get("log_level"), str):
        table["log_level"] = table["log_level"].lower()
    server = source.convert(table, ServerConfig, ("server",), overridden=frozenset(overrides))
    for origin in server.cors:
        if reason := bad_origin(origin):
            raise source.error(f"cors: {origin!r} {reason}", ("server", "cors"))
    return server


def _need_keys(source: "_Source", home: Path, host: str, *, is_override: bool) -> None:
    """Whoever others can reach must know who asks. Raises `ConfigError`."""
    file = KeyFile(keys_path(home))
    try:
        has_keys = bool(file.read())
    except KeysUnusable as error:
        raise ConfigError(str(error)) from None
    if not has_keys:
        raise ConfigError(
            f"refusing to listen on {host!r}, where others can reach it, without an API key. "
            "Make one first: mlxctl keys create NAME",
            None if is_override else source.path,
            None if is_override else source.line(("server", "host")),
        )


def _models(source: "_Source", raw: Any) -> dict[str, ModelConfig]:
    if not isinstance(raw, dict):
        raise source.error("models must be a table: write [models.NAME]", ("models",))
    models: dict[str, ModelConfig] = {}
    for name, body in raw.items():
        where = ("models", name)
        if reason := _bad_name(name):
            raise source.error(f"model name {name!r} {reason}", where)
        table = source.table(body, ModelConfig, where, hidden=("name",))
        if isinstance(table.get("sampling"), dict):
            table["sampling"] = source.table(table["sampling"], SamplingDefaults, (*where, "sampling"))
        if isinstance(table.get("cache"), dict):
            table["cache"] = source.table(table["cache"], CacheConfig, (*where, "cache"))
        if isinstance(table.get("log_level"), str):
            table["log_level"] = table["log_level"].lower()
        table["name"] = name
        table["path"] = source.model_path(table.get("path", name))
        models[name] = source.convert(table, ModelConfig, where)
        if reason := bad_parser(models[name].parser):
            raise source.error(reason, (*where, "parser"))
        for alias in models[name].aliases:
            if reason := _bad_alias(alias):
                raise source.error(f"alias {alias!r} {reason}", (*where, "aliases"))
    return models


def _found_models() -> dict[str, ModelConfig]:
    demo = ModelConfig(name="demo", path="demo", aliases=("default",))
    found = [name for name in cached_models() if name not in ("demo", "default") and not _bad_name(name)]
    return {"demo": demo} | {name: ModelConfig(name=name, path=name) for name in found}


def _refuse_duplicates(source: "_Source", models: dict[str, ModelConfig]) -> None:
    owner: dict[str, str] = {}
    for model in models.values():
        for alias in model.aliases:
            where = ("models", model.name, "aliases")
            if alias in models and alias != model.name:
                raise source.error(f"alias {alias!r} of model {model.name!r} is the name of another model", where)
            if alias == model.name or owner.setdefault(alias, model.name) != model.name:
                taken = owner.get(alias, model.name)
                raise source.error(f"alias {alias!r} of model {model.name!r} already belongs to {taken!r}", where)


def _bad_name(name: str) -> str | None:
    if "*" in name:
        return "must not contain '*': patterns belong in aliases"
    if name.startswith("-"):
        return "must not begin with '-'"
    return _bad_alias(name)


def _bad_alias(alias: str) -> str | None:
    if not alias:
        return "is empty"
    if any(c.isspace() or not c.isprintable() for c in alias):
        return "must not contain spaces or control characters"
    if len(alias.encode()) > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes"
    return None


# -- reading, and finding the line of what is wrong ------------------------------------------------------------------


class _Source:
    """One configuration file: its path and, once read, where each key stands."""

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
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message, line = self._locator.syntax_error(error)
            raise ConfigError(message, self.path, line) from None

    def line(self, key: tuple[str, ...]) -> int | None:
        return self._locator.line(key)

    def error(self, message: str, key: tuple[str, ...]) -> ConfigError:
        return ConfigError(message, self.path, self.line(key))

    def refuse_unknown(self, table: dict[str, Any], known: tuple[str, ...], where: tuple[str, ...]) -> None:
        for key in table:
            if key in known:
                continue
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            inside = f" in [{'.'.join(where)}]" if where else ""
            raise self.error(f"unknown key {key!r}{inside}; {hint}", (*where, key))

    def table(
        self, raw: Any, struct: type[Struct], where: tuple[str, ...], hidden: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """`raw` with its keys renamed to the fields of `struct` and its durations and sizes as numbers."""
        if not isinstance(raw, dict):
            raise self.error(f"{'.'.join(where)} must be a table", where)
        fields = {name: name for name in struct.__struct_fields__ if name not in hidden}
        short = {file_key(name): name for name in fields}
        self.refuse_unknown(raw, tuple(short | fields), where)
        table: dict[str, Any] = {}
        for key, value in raw.items():
            field = short.get(key) or fields[key]
            if field in table:
                raise self.error(f"{file_key(field)!r} is given twice", (*where, key))
            table[field] = self._number(field, value, (*where, key))
        return table

    def _number(self, field: str, value: Any, where: tuple[str, ...]) -> Any:
        parse: Callable[[str], float] | None = None
        if field.endswith("_s"):
            parse = parse_duration
        elif field.endswith("_bytes"):
            parse = parse_size
        if parse is None or not isinstance(value, str):
            return value
        try:
            return parse(value)
        except ValueError as error:
            raise self.error(f"{where[-1]}: {error}", where) from None

    def convert(
        self, table: dict[str, Any], struct: type[T], where: tuple[str, ...], overridden: frozenset[str] = frozenset()
    ) -> T:
        """Check types and ranges. Raises `ConfigError` at the line of the value that is wrong."""
        try:
            return msgspec.convert(table, struct)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            field = place.rstrip("`").partition("[")[0]
            key = tuple(field.split("."))
            if key[0] in overridden:
                raise ConfigError(f"--{key[0].replace('_', '-')}: {_sentence(what)}") from None
            line = self._locator.line((*where, *key[:-1], file_key(key[-1])), (*where, *key))
            raise ConfigError(f"{file_key(field)}: {_sentence(what)}", self.path, line) from None

    def model_path(self, path: Any) -> Any:
        """A folder becomes absolute (relative to the file's folder); a repository id stays as it is."""
        if not isinstance(path, str):
            return path
        if path.startswith("~"):
            return str(Path(path).expanduser())
        if path in (".", "..") or path.startswith(("./", "../")):
            return os.path.normpath(self.path.absolute().parent / path)
        return path


def file_key(field: str) -> str:
    """The key of a field as the file spells it best: without its unit."""
    return field.removesuffix("_s").removesuffix("_bytes") if field.endswith(("_s", "_bytes")) else field


def _sentence(what: str) -> str:
    return what.replace("`", "").replace("Expected", "expected").replace("Invalid enum value", "unknown value")
