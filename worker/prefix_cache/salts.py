"""Salts of prefixes: KV is never used under another salt."""

import hashlib
from typing import Final

_ADAPTER: Final = "lora:"


def adapter_salt(digest: str) -> str:
    """Return the prefix of the salts of rows with an adapter, from the hexadecimal digest of the adapter's files.

    The prefix comes first, because a client chooses the end of a salt, after the part of its API key and a NUL.
    """
    return f"{_ADAPTER}{digest}\0"


def salt_key(salt: str) -> str:
    """Return the name that stands for a salt in the cache and its files, because these must not reveal the salt. The
    integer id of an adapter is appended.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()
    if not salt.startswith(_ADAPTER):
        return key
    digest, _, _ = salt.removeprefix(_ADAPTER).partition("\0")
    return f"{key}.{1 + int(digest[:8], 16) % (2**31 - 1)}"


def adapter_number(key: str) -> int | None:
    """Return the integer id of the adapter of a salt key, positive with 31 bits; None for the base model."""
    _, _, number = key.partition(".")
    return int(number) if number else None
