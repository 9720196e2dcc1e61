"""API key with its limits, its rights and the hash of its secret.

Changes of API keys as lines of the audit log. Comparing all keys before and after finds every change.

File of the API keys: `keys/keys.json` in the home, mode 0600, with a salted hash of each secret.

A slow hash protects guessable secrets, and would slow down each request. These secrets have 256 random bits, so a fast
hash is enough. The salt prevents recognising a secret of one file in another. The file is replaced atomically, under a
lock, so that a reader sees it before or after a change and never in between.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.access.audit_log import Audit, AuditEntry, AuditUnwritable, Fact, entry
from gateway.command_failed import CommandFailed
from gateway.disk_and_clock import SYSTEM_DISK, Disk
from gateway.state_dir import FolderRefused, HomeFolder, write_private_in

log = logging.getLogger(__name__)

Limit = Annotated[int, Meta(ge=0, le=10**12)]
Percent = Annotated[int, Meta(ge=0, le=100)]
# The limit is in the year 5138; tables have no room for the digits of much later dates.
EXPIRY_MAX_S: Final = 1e11
# Expiry is a Unix time.
Expiry = Annotated[float, Meta(ge=0, le=EXPIRY_MAX_S)]


class KeyLimits(Struct, frozen=True, kw_only=True):
    """Limits of a key; 0 means no limit. A request counts as its number of sequences: prompts times choices."""

    rpm: Limit = 0
    tpm: Limit = 0
    concurrency: Limit = 0
    # Maximum sequences of one request, and maximum tokens of one answer.
    max_sequences: Limit = 0
    max_tokens: Limit = 0
    # Percent of a model's queue that the key may fill while there are other keys; 0 means the default.
    queue_share: Percent = 0
    requests_per_day: Limit = 0
    tokens_per_day: Limit = 0
    requests_per_month: Limit = 0
    tokens_per_month: Limit = 0
    # A daily or monthly budget is logged once this percentage is used; 0 logs only a spent budget.
    alert_at: Percent = 80

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) for name in _LIMITS)


_LIMITS: Final = frozenset(KeyLimits.__struct_fields__) - {"alert_at"}


class Key(KeyLimits, frozen=True, kw_only=True):
    """One API key. Empty `models` means all models; times are Unix times.

    Requests of a lower `priority` run first. `cache_salt` separates the key's prefix cache from other keys', who could
    otherwise infer earlier prompts from response times. An empty salt means the common cache.

    Fields of a later mlxd are ignored here and preserved by every change. If ignoring a field would extend a key's
    rights, that mlxd lists it in `requires`: a key that requires an unknown field grants nothing.
    """

    name: str
    prefix: str
    salt: str
    hash: str
    models: tuple[str, ...] = ()
    expires: float | None = None
    is_admin: bool = False
    # A metrics key may read `/metrics` and nothing else.
    is_metrics_only: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    cache_salt: str = ""
    created: float = 0.0
    is_disabled: bool = False
    # Whether the key's requests may be sent to an upstream if their model allows it.
    may_leave: bool = False
    # Random id under which the key's requests store responses, batches and files. A key of an earlier version has none.
    id: str = ""
    # Names of fields that a mlxd must know to accept this key.
    requires: tuple[str, ...] = ()

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    @property
    def owner(self) -> str:
        """Owner of what the key's requests store. A key that gets a revoked key's name is another owner."""
        return self.id or self.name

    @property
    def is_usable(self) -> bool:
        """Whether the key grants anything. Does not check its expiry."""
        return not self.is_disabled and KNOWN.issuperset(self.requires)

    @property
    def role(self) -> Literal["user", "admin", "metrics"]:
        return "admin" if self.is_admin else "metrics" if self.is_metrics_only else "user"

    def is_opened_by(self, secret: bytes) -> bool:
        """Whether `secret` is the key's secret, compared in constant time."""
        return hmac.compare_digest(digest(self.salt, secret), self.hash)


# Names of the fields that this version knows.
KNOWN: Final = frozenset(Key.__struct_fields__)


def digest(salt: str, secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=32, salt=bytes.fromhex(salt), person=b"mlxd-key").hexdigest()


# These fields are never recorded: they could identify a secret, or follow from other fields or from the line's time.
_HIDDEN: Final = frozenset({"name", "salt", "hash", "cache_salt", "requires", "created", "id"})
# These fields change with the secret.
_SECRET: Final = frozenset({"prefix", "hash"})


def key_changes(before: Iterable[Key], after: Iterable[Key]) -> Iterator[AuditEntry]:
    """Yield one line for each key that was created, changed, rotated or revoked."""
    old, new = ({key.name: key for key in keys} for keys in (before, after))
    for name, key in new.items():
        was = old.get(name)
        if was is None:
            yield entry("key.create", name, facts=_made(key))
            continue
        if was.hash != key.hash:
            yield entry("key.rotate", name, facts={"prefix": key.prefix})
        if facts := _changed(was, key):
            yield entry("key.change", name, facts=facts)
    for name in old.keys() - new.keys():
        yield entry("key.revoke", name, facts={"prefix": old[name].prefix})


def _made(key: Key) -> dict[str, Fact]:
    """Return the fields of a new key that differ from the defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(key)}
    shown = [name for name in defaults if name not in _HIDDEN and getattr(key, name) != defaults[name]]
    facts: dict[str, Fact] = {name: _fact(getattr(key, name)) for name in shown}
    return facts | ({} if key.cache_salt else {"shares_cache": True})


def _changed(was: Key, key: Key) -> dict[str, Fact]:
    """Return each field that differs, with its old and its new value."""
    names = [name for name in was.__struct_fields__ if name not in _HIDDEN | _SECRET]
    facts: dict[str, Fact] = {
        name: f"{_text(getattr(was, name))} -> {_text(getattr(key, name))}"
        for name in names
        if getattr(was, name) != getattr(key, name)
    }
    if bool(was.cache_salt) != bool(key.cache_salt):
        facts["shares_cache"] = f"{_text(not was.cache_salt)} -> {_text(not key.cache_salt)}"
    return facts


def _fact(value: object) -> Fact:
    return value if isinstance(value, str | int | float | None) else _text(value)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else msgspec.json.encode(value).decode()  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


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
