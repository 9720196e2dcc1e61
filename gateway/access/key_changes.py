"""Changes of API keys as lines of the audit log. Comparing all keys before and after finds every change."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gateway.access.audit_log import AuditEntry, Fact, entry
from gateway.access.key import Key

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
