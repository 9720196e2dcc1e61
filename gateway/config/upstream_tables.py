"""Reads the tables `[upstreams.NAME]`, which configure other endpoints, and their files."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import fields, replace

from gateway.config.origins import is_loopback
from gateway.config.remote_settings import UpstreamConfig
from gateway.config.settings import ModelConfig
from gateway.config.source import ConfigSource


def read_upstreams(source: ConfigSource, raw: Any, models: Mapping[str, ModelConfig]) -> dict[str, UpstreamConfig]:
    """Read all upstreams, make their paths absolute, and check the models' fallbacks. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        raise source.error("upstreams must be a table: write [upstreams.NAME]", ("upstreams",))
    upstreams = {name: _upstream(source, name, body, ("upstreams", name)) for name, body in raw.items()}
    for model in models.values():
        for name in model.fallback.to:
            where = ("models", model.name, "fallback")
            if name not in upstreams:
                raise source.error(f"fallback: there is no [upstreams.{name}]", where)
            if model.name not in upstreams[name].models:
                raise source.error(f"fallback: models of [upstreams.{name}] has no {model.name!r}", where)
    return upstreams


def _upstream(source: ConfigSource, name: str, body: Any, where: tuple[str, ...]) -> UpstreamConfig:
    """Read one upstream and make its paths absolute. Raises `ConfigError`."""
    table = source.table(body, UpstreamConfig, where)
    for field in fields(UpstreamConfig):
        if field.required and field.name not in ("name", *table):
            raise source.error(f"an upstream needs {field.name}", where)
    far = source.convert(table | {"name": name}, UpstreamConfig, where)
    if reason := _bad_url(far):
        raise source.error(f"url: {far.url!r} {reason}", (*where, "url"))
    key_file = ""
    if far.key_file:
        key_file = str(source.path_of(far.key_file))
        try:
            read_secret(Path(key_file))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise source.error(f"key_file: {key_file}: {reason}", (*where, "key_file")) from None
    ca = str(source.path_of(far.ca)) if far.ca else ""
    try:
        ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise source.error(f"ca: {ca} holds no certificates (PEM): {error}", (*where, "ca")) from None
    return replace(far, url=far.url.rstrip("/"), key_file=key_file, ca=ca)


def read_secret(path: Path) -> str:
    """Read the API key in a file. Raises `OSError`, or `ValueError` if it cannot be a key."""
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError("is empty")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ValueError("holds no key: one line of text is expected")
    return secret


def _bad_url(upstream: UpstreamConfig) -> str:
    """Return why the URL of an endpoint is invalid or must not be used; empty if it is good."""
    try:
        url = urlsplit(upstream.url)
        port = url.port
    except ValueError as error:
        return f"is no URL: {error}"
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return "must be https://HOST:PORT, or http://"
    if url.query or url.fragment or url.username is not None:
        return "must have no query or user"
    if url.scheme == "http" and not is_loopback(url.hostname) and not upstream.plain_http:
        return (
            "is plain HTTP: keys, prompts and answers could be read on the network. Use https, or set plain_http = true"
        )
    return ""
