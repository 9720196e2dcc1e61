"""From the configuration file to `Config`, checked. What is wrong in it is a `ConfigError` that names the line."""

from pathlib import Path
from typing import Any

from gateway.config import (
    CONFIG_NAME,
    NAME_BYTES_MAX,
    CacheConfig,
    Config,
    ConfigError,
    ModelConfig,
    SamplingDefaults,
    ServerConfig,
    keys_path,
)
from gateway.configsource import Source
from gateway.hfcache import cached_models
from gateway.keys import KeyFile, KeysUnusable
from gateway.origins import bad_origin, is_loopback
from gateway.parsers import bad_parser


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
    source = Source(path or home / CONFIG_NAME)
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


def _server(source: Source, raw: Any, overrides: dict[str, Any]) -> ServerConfig:
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


def _need_keys(source: Source, home: Path, host: str, *, is_override: bool) -> None:
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


def _models(source: Source, raw: Any) -> dict[str, ModelConfig]:
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


def _refuse_duplicates(source: Source, models: dict[str, ModelConfig]) -> None:
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
