"""File of the API keys: `keys/keys.json` in the home, mode 0600, with a salted hash of each secret.

A slow hash protects guessable secrets, and would slow down each request. These secrets have 256 random bits, so a fast
hash is enough. The salt prevents recognising a secret of one file in another. The file is replaced atomically, under a
lock, so that a reader sees it before or after a change and never in between.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.access.audit_log import Audit, AuditUnwritable
from gateway.access.key import EXPIRY_MAX_S, KNOWN, Key, digest
from gateway.access.key_changes import key_changes
from gateway.disk import SYSTEM_DISK, Disk
from gateway.failed import CommandFailed
from gateway.state_dir.folder import FolderRefused, HomeFolder
from gateway.state_dir.private_file import write_private_in

log = logging.getLogger(__name__)

# Some clients require the prefix `sk-`.
SECRET_START: Final = "sk-mlxd-"
SECRET_BYTES: Final = 32
# This many characters of a secret are stored unhashed, to recognise it by; 208 random bits remain.
PREFIX_CHARS: Final = len(SECRET_START) + 8
SECRET_CHARS_MAX: Final = 256
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
FILE_VERSION: Final = 1

_DEFAULTS: Final[dict[str, Any]] = msgspec.to_builtins(Key(name="", prefix="", salt="", hash=""))
# A mlxd that ignored one of these fields would grant the key more rights.
_RESTRICTIONS: Final = frozenset({"is_disabled", "is_metrics_only"})


class _Contents(Struct, frozen=True):
    keys: tuple[Key, ...]
    version: int = FILE_VERSION


@dataclass(frozen=True, slots=True)
class _Read:
    """The parsed file: its keys, and its raw content including fields of other versions."""

    keys: tuple[Key, ...] = ()
    raw: dict[str, Any] | None = None


class KeysUnusable(CommandFailed):
    """The file cannot be read, or is no key file."""


class KeyRefused(CommandFailed):
    """A key cannot be created or found."""


# A replaced file has another inode, so a changed stamp means that the file has changed.
Stamp = tuple[int, int, int]

_decoder = msgspec.json.Decoder(_Contents)


def has_keys(path: Path) -> bool:
    """Whether there is a key in the file. Raises `KeysUnusable`."""
    return bool(KeyFile(path).read())


class KeyFile:
    """The API keys of one home. A missing file means that no key was ever made. If the file exists, even empty, keys
    are required.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, client: str = "", disk: Disk = SYSTEM_DISK
    ) -> None:
        """`client` and this process are recorded in the audit log as the author of changes."""
        self.path = path
        self._client = client
        self._folder = HomeFolder(path.parent)
        self._audit = Audit(path.parent.parent, disk=disk)
        self._disk = disk
        self._clock = clock

    def stamp(self) -> Stamp | None:
        """Return the file's stamp; None if there is no file. Raises `OSError` if the stamp cannot be read."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return (status.st_ino, status.st_mtime_ns, status.st_size)

    def read(self) -> tuple[Key, ...]:
        """Return all keys, none if there is no file. Raises `KeysUnusable`."""
        return self._read().keys

    def unknown(self) -> list[str]:
        """Return the names of fields that this version does not know and ignores. Raises `KeysUnusable`."""
        raw = self._read().raw or {}
        of_keys = {name for key in raw.get("keys", ()) for name in key}
        return sorted((of_keys - KNOWN) | (raw.keys() - set(_Contents.__struct_fields__)))

    def _read(self, folder: int | None = None) -> _Read:
        """Read the file from `folder`, or open its folder if that is None."""
        try:
            if folder is None:
                with self._folder.open_existing() as opened:
                    return self._read(opened)
            mode, data = self._folder.read(folder, self.path.name)
        except FileNotFoundError:
            return _Read()
        except (OSError, FolderRefused) as error:
            raise self._unusable(error) from None
        if mode & 0o022:
            raise KeysUnusable(f"{self.path} can be written by others; run: chmod 600 {self.path}")
        try:
            return _Read(_decode(data), msgspec.json.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyRefused) as error:
            raise KeysUnusable(f"{self.path}: {error}") from None

    def create(self, key: Key, *, shares_cache: bool = False) -> tuple[Key, str]:
        """Store a copy of `key` with a new secret. Returns that key and the secret. Raises `KeyRefused`,
        `KeysUnusable`.
        """
        with self._changing() as keys:
            if key.name in keys:
                raise KeyRefused(f"there is a key {key.name!r} already; revoke or rotate it, or choose another name")
            salt = "" if shares_cache else secrets.token_hex(8)
            own = msgspec.structs.replace(key, created=self._clock(), cache_salt=salt, id=secrets.token_hex(8))
            created, secret = _with_secret(own)
            created = _marked(created)
            _check(created)
            _check_expiry(created)
            keys[created.name] = created
        return created, secret

    def change(self, name: str, *, shares_cache: bool | None = None, **fields: Any) -> Key:
        """Replace fields of a key. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            key = msgspec.structs.replace(_find(keys, name), **fields)
            if shares_cache is not None and shares_cache is bool(key.cache_salt):
                key = msgspec.structs.replace(key, cache_salt="" if shares_cache else secrets.token_hex(8))
            keys[name] = key = _marked(key)
            _check(key)
            if "expires" in fields:
                _check_expiry(key)
        return key

    def rotate(self, name: str) -> tuple[Key, str]:
        """Replace a key's secret. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            key, secret = _with_secret(_find(keys, name))
            keys[name] = key
        return key, secret

    def revoke(self, name: str) -> int:
        """Remove a key, and return the number of keys left. Raises `KeyRefused`, `KeysUnusable`."""
        with self._changing() as keys:
            _find(keys, name)
            del keys[name]
            return len(keys)

    @contextmanager
    def _changing(self) -> Generator[dict[str, Key], None, None]:
        """Yield the keys by name for changes in the block, then write them unless the block raises."""
        try:
            with self._folder.open_locked() as folder:
                before = self._read(folder)
                keys = {key.name: key for key in before.keys}
                yield keys
                if tuple(keys.values()) != before.keys:
                    write_private_in(folder, self.path.name, _encode(keys.values(), before.raw or {}), self._disk)
                    self._record(before.keys, keys.values())
        except (OSError, FolderRefused) as error:
            raise self._unusable(error) from None

    def _record(self, before: Iterable[Key], after: Iterable[Key]) -> None:
        """Write the changes to the audit log. A failure does not undo them, since a key must be revocable on a full
        disk.
        """
        try:
            for entry in key_changes(before, after):
                self._audit.record(msgspec.structs.replace(entry, client=self._client))
        except AuditUnwritable as error:
            log.error("not in the audit log: %s", error)

    def _unusable(self, error: OSError | FolderRefused) -> KeysUnusable:
        if isinstance(error, FolderRefused):
            return KeysUnusable(str(error))
        return KeysUnusable(f"{self.path}: {error.strerror or error}")


def _decode(data: bytes) -> tuple[Key, ...]:
    contents = _decoder.decode(data)
    if contents.version != FILE_VERSION:
        raise KeyRefused(f"is of version {contents.version}; this mlxd reads {FILE_VERSION}")
    names = [key.name for key in contents.keys]
    if len(set(names)) != len(names):
        raise KeyRefused("two keys have one name")
    for key in contents.keys:
        _check(key)
    return contents.keys


def _encode(keys: Iterable[Key], before: dict[str, Any]) -> bytes:
    """Encode the file with these keys. Fields of other versions, in keys and in the file, are preserved."""
    others = {raw["name"]: {name: raw[name] for name in raw.keys() - KNOWN} for raw in before.get("keys", ())}
    written = [_written(key) | others.get(key.name, {}) for key in keys]
    whole = before | {"keys": written, "version": FILE_VERSION}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def _written(key: Key) -> dict[str, Any]:
    """Return the fields of a key that differ from their defaults. The others are left out, because an older mlxd may
    not know them.
    """
    return {name: value for name, value in msgspec.to_builtins(key).items() if value != _DEFAULTS[name]}


def _marked(key: Key) -> Key:
    """Set `requires`, so that an older mlxd refuses a key whose restrictions it does not know."""
    needed = {name for name in _RESTRICTIONS if getattr(key, name)} | (set(key.requires) - _RESTRICTIONS)
    return msgspec.structs.replace(key, requires=tuple(sorted(needed)))


def _with_secret(key: Key) -> tuple[Key, str]:
    secret = SECRET_START + secrets.token_urlsafe(SECRET_BYTES)
    salt = secrets.token_hex(16)
    hashed = msgspec.structs.replace(key, prefix=secret[:PREFIX_CHARS], salt=salt, hash=digest(salt, secret.encode()))
    return hashed, secret


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
    if key.is_admin and (key.models or key.is_limited):
        raise KeyRefused(f"key {key.name!r}: an admin key has all models and no limits")
    if key.is_metrics_only and (key.is_admin or key.models or key.is_limited):
        raise KeyRefused(f"key {key.name!r}: a key that reads metrics only has no models and no limits")
    if key.may_leave and key.is_metrics_only:
        raise KeyRefused(f"key {key.name!r}: requests of a scraper never leave")
    try:
        # Constructing a struct validates nothing, and the written file must be readable.
        msgspec.convert(msgspec.to_builtins(key), Key)
    except msgspec.ValidationError as error:
        raise KeyRefused(f"key {key.name!r}: {error}") from None
    try:
        digest(key.salt, b"")
    except ValueError:
        raise KeyRefused(f"key {key.name!r}: the salt is damaged") from None


def _check_expiry(key: Key) -> None:
    """Check the expiry of a key that is being changed. Unchanged keys may have any expiry, because older versions
    allowed it.
    """
    if key.expires is not None and not key.expires <= EXPIRY_MAX_S:
        raise KeyRefused(f"key {key.name!r}: it would expire after the year 5138; let it never expire")
