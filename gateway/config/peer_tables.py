"""`[peers.NAME]`: other daemons, checked with the files that they name."""

import ssl
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import structs

from gateway.config.origins import is_loopback
from gateway.config.settings import PeerConfig
from gateway.config.source import Source


def read_peers(
    source: Source, raw: Any, models: Container[str], bad_name: Callable[[str], str | None]
) -> dict[str, PeerConfig]:
    """All of them, with absolute paths. Raises `ConfigError`."""
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
        peers[name] = _peer(source, name, body, where)
    return peers


def _peer(source: Source, name: str, body: Any, where: tuple[str, ...]) -> PeerConfig:
    table = source.table(body, PeerConfig, where, hidden=("name",))
    for needed in ("url", "key_file"):
        if needed not in table:
            raise source.error(f"a peer needs {needed}", where)
    peer = source.convert(table | {"name": name}, PeerConfig, where)
    if reason := _bad_url(peer):
        raise source.error(f"url: {peer.url!r} {reason}", (*where, "url"))
    key_file = source.path_of(peer.key_file)
    try:
        read_secret(key_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise source.error(f"key_file: {key_file}: {reason}", (*where, "key_file")) from None
    ca = str(source.path_of(peer.ca)) if peer.ca else ""
    try:
        ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise source.error(f"ca: {ca} holds no certificates (PEM): {error}", (*where, "ca")) from None
    return structs.replace(peer, url=peer.url.rstrip("/"), key_file=str(key_file), ca=ca)


def read_secret(path: Path) -> str:
    """The key in a file of its own. Raises `OSError`, and `ValueError` for what cannot be a key."""
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError("is empty")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ValueError("holds no key: one line of text is expected")
    return secret


def _bad_url(peer: PeerConfig) -> str:
    """The reason why the URL cannot be a daemon's, or must not be used."""
    try:
        url = urlsplit(peer.url)
        port = url.port
    except ValueError as error:
        return f"is no URL: {error}"
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return "must be https://HOST:PORT, or http://"
    if url.path.rstrip("/") or url.query or url.fragment or url.username is not None:
        return "must have no path, query or user"
    if url.scheme == "http" and not is_loopback(url.hostname) and not peer.plain_http:
        return (
            "is plain HTTP: keys, prompts and answers could be read on the network. Use https, or set plain_http = true"
        )
    return ""
