"""API keys at rest: `keys/keys.json` in the home, mode 0600, with a salted hash of each secret.

A secret is 256 random bits. A slow hash protects what can be guessed; here nothing can, and each request would pay for
it. The salt keeps two files from being compared. The file is replaced as a whole, under a lock, so that a reader sees
it before or after a change and never in between.
"""

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from gateway.failed import Failed
from gateway.private import write_private

# `sk-` because some clients look for it.
SECRET_START: Final = "sk-mlxd-"
SECRET_BYTES: Final = 32
# What is kept of a secret in the clear, to recognise it by; 208 random bits remain.
PREFIX_CHARS: Final = len(SECRET_START) + 8
SECRET_CHARS_MAX: Final = 256
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
FILE_VERSION: Final = 1

Limit = Annotated[int, Meta(ge=0, le=10**12)]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. `models` empty means all; limits of 0 mean none; times are seconds since 1970.

    Requests of a lower `priority` run first. `cache_salt` keeps the prefix cache of one key from the others, who could
    otherwise tell by the time of an answer what has been asked before; empty means the common cache.
    """

    name: str
    prefix: str
    salt: str
    hash: str
    models: tuple[str, ...] = ()
    rpm: Limit = 0
    tpm: Limit = 0
    concurrency: Limit = 0
    expires: float | None = None
    is_admin: bool = False
    # May read `/metrics`, and nothing else.
    is_metrics_only: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    cache_salt: str = ""
    created: float = 0.0

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    def is_opened_by(self, secret: bytes) -> bool:
        """Whether this is the key's secret; takes the same time whatever the answer."""
        return hmac.compare_digest(digest(self.salt, secret), self.hash)


class _Contents(Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[Key, ...]
    version: int = FILE_VERSION


class KeysUnusable(Failed):
    """The file cannot be read, or is none of ours."""


class KeyRefused(Failed):
    """A key cannot be made or found."""


# Changes whenever the file does: a replaced file has another inode.
Stamp = tuple[int, int, int]

_decoder = msgspec.json.Decoder(_Contents)


def digest(salt: str, secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=32, salt=bytes.fromhex(salt), person=b"mlxd-key").hexdigest()


class KeyFile:
    """The keys of one home. Without the file there has never been a key; with it, even empty, keys are required."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock

    def stamp(self) -> Stamp | None:
        """None without a file. Raises `OSError` when that cannot be known."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def read(self) -> tuple[Key, ...]:
        """All keys; none without a file. Raises `KeysUnusable`."""
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise KeysUnusable(f"{self.path}: {error.strerror or error}") from None
        if mode & 0o022:
            raise KeysUnusable(f"{self.path} can be written by others; run: chmod 600 {self.path}")
        try:
            contents = _decoder.decode(data)
            names = [key.name for key in contents.keys]
            if contents.version != FILE_VERSION:
                raise KeysUnusable(f"{self.path} is of version {contents.version}; this mlxd reads {FILE_VERSION}")
            if len(set(names)) != len(names):
                raise KeysUnusable(f"{self.path} has two keys of one name")
            for key in contents.keys:
                _check(key)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyRefused) as error:
            raise KeysUnusable(f"{self.path}: {error}") from None
        return contents.keys

    def create(self, key: Key, *, shares_cache: bool = False) -> tuple[Key, str]:
        """Keep a key like `key`, with a secret of its own. Returns both. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            if key.name in keys:
                raise KeyRefused(f"there is a key {key.name!r} already; revoke or rotate it, or choose another name")
            salt = "" if shares_cache else secrets.token_hex(8)
            made, secret = _with_secret(msgspec.structs.replace(key, created=self._clock(), cache_salt=salt))
            _check(made)
            keys[made.name] = made
        return made, secret

    def rotate(self, name: str) -> tuple[Key, str]:
        """A new secret for a key; the old one ends. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            key, secret = _with_secret(_find(keys, name))
            keys[name] = key
        return key, secret

    def revoke(self, name: str) -> int:
        """Remove a key. Returns how many are left. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            _find(keys, name)
            del keys[name]
            return len(keys)

    @contextmanager
    def _changing(self) -> Generator[dict[str, Key], None, None]:
        """The keys by name; what they are at the end is written, unless an exception ends it."""
        folder = self.path.parent
        try:
            # Parents that `mkdir` makes itself have the ordinary mode.
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise KeysUnusable(f"{folder}: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _belong_to_owner(folder)
            keys = {key.name: key for key in self.read()}
            before = dict(keys)
            yield keys
            if keys != before:
                self._write(tuple(keys.values()))
        finally:
            os.close(lock)

    def _write(self, keys: tuple[Key, ...]) -> None:
        data = msgspec.json.format(msgspec.json.encode(_Contents(keys)), indent=2) + b"\n"
        try:
            write_private(self.path, data)
        except OSError as error:
            raise KeysUnusable(f"{self.path}: {error.strerror or error}") from None


def _belong_to_owner(folder: Path) -> None:
    """What root made in a service's home, the service's user must be able to read."""
    if os.geteuid() != 0:
        return
    home = folder.parent.stat()
    for path in (folder, *folder.iterdir()):
        os.chown(path, home.st_uid, home.st_gid, follow_symlinks=False)


def _with_secret(key: Key) -> tuple[Key, str]:
    secret = SECRET_START + secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_hex(16)
    made = msgspec.structs.replace(key, prefix=secret[:PREFIX_CHARS], salt=salt, hash=digest(salt, secret.encode()))
    return made, secret


def _find(keys: dict[str, Key], name: str) -> Key:
    if name not in keys:
        known = ", ".join(keys) or "there are none"
        raise KeyRefused(f"there is no key {name!r}; keys: {known}")
    return keys[name]


def _check(key: Key) -> None:
    if not NAME.fullmatch(key.name):
        raise KeyRefused(
            f"the name {key.name!r} cannot be used: at most 64 letters, digits and . _ @ -, a letter or digit first"
        )
    if not all(key.models):
        raise KeyRefused(f"key {key.name!r}: a model pattern is empty")
    if key.is_admin and (key.models or key.rpm or key.tpm or key.concurrency):
        raise KeyRefused(f"key {key.name!r}: an admin key has all models and no limits")
    if key.is_metrics_only and (key.is_admin or key.models or key.rpm or key.tpm or key.concurrency):
        raise KeyRefused(f"key {key.name!r}: a key that reads metrics only has no models and no limits")
    try:
        # Constructing a struct checks nothing, and what is written must be readable.
        msgspec.convert(msgspec.to_builtins(key), Key)
    except msgspec.ValidationError as error:
        raise KeyRefused(f"key {key.name!r}: {error}") from None
    try:
        digest(key.salt, b"")
    except ValueError:
        raise KeyRefused(f"key {key.name!r}: the salt is damaged") from None
