"""Reads the tables `[peers.NAME]` and `[upstreams.NAME]`, which configure other daemons and endpoints, and
their files.
"""

import ssl
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from msgspec.structs import fields, replace

from gateway.config.origins import is_loopback
from gateway.config.remote_settings import PeerConfig, UpstreamConfig
from gateway.config.settings import ModelConfig
from gateway.config.source import ConfigSource

T = TypeVar("T", PeerConfig, UpstreamConfig)


def read_peers(
    source: ConfigSource, raw: Any, models: Container[str], bad_name: Callable[[str], str | None]
) -> dict[str, PeerConfig]:
    """Read all peers and make their paths absolute. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        raise source.error("peers must be a table: write [peers.NAME]", ("peers",))
    peers: dict[str, PeerConfig] = {}
    for name, body in raw.items():
        where = ("peers", name)
        reason = "must not contain '/'" if "/" in name else bad_name(name)
        if reason:
            raise source.error(f"peer name {name!r} {reason}", where)
        if name in models:
            raise source.error(f"peer name {name!r} is the name of a model", where)
        peers[name] = _remote(source, name, body, PeerConfig, where)
    return peers


def read_upstreams(source: ConfigSource, raw: Any, models: Mapping[str, ModelConfig]) -> dict[str, UpstreamConfig]:
    """Read all upstreams, make their paths absolute, and check the models' fallbacks. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        raise source.error("upstreams must be a table: write [upstreams.NAME]", ("upstreams",))
    upstreams = {name: _remote(source, name, body, UpstreamConfig, ("upstreams", name)) for name, body in raw.items()}
    for model in models.values():
        for name in model.fallback.to:
            where = ("models", model.name, "fallback")
            if name not in upstreams:
                raise source.error(f"fallback: there is no [upstreams.{name}]", where)
            if model.name not in upstreams[name].models:
                raise source.error(f"fallback: models of [upstreams.{name}] has no {model.name!r}", where)
    return upstreams


def _remote(source: ConfigSource, name: str, body: Any, struct: type[T], where: tuple[str, ...]) -> T:
    """Read one peer or upstream and make its paths absolute. Raises `ConfigError`."""
    is_peer = struct is PeerConfig
    table = source.table(body, struct, where)
    for field in fields(struct):
        if field.required and field.name not in ("name", *table):
            raise source.error(f"{'a peer' if is_peer else 'an upstream'} needs {field.name}", where)
    far = source.convert(table | {"name": name}, struct, where)
    if reason := _bad_url(far, has_path=not is_peer):
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


def _bad_url(peer: PeerConfig | UpstreamConfig, *, has_path: bool) -> str:
    """Return why the URL of a daemon or endpoint is invalid or must not be used; empty if it is good."""
    try:
        url = urlsplit(peer.url)
        port = url.port
    except ValueError as error:
        return f"is no URL: {error}"
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return "must be https://HOST:PORT, or http://"
    if (url.path.rstrip("/") and not has_path) or url.query or url.fragment or url.username is not None:
        return "must have no path, query or user"
    if url.scheme == "http" and not is_loopback(url.hostname) and not peer.plain_http:
        return (
            "is plain HTTP: keys, prompts and answers could be read on the network. Use https, or set plain_http = true"
        )
    return ""
