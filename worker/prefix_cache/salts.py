"""Salts of prefixes: KV under one salt is never used under another."""

import hashlib
from typing import Final

_ADAPTER: Final = "lora:"


def adapter_salt(digest: str) -> str:
    """The beginning of the salts of rows with an adapter, by the hexadecimal digest of its files.

    It stands in front, because a client chooses the end of a salt, which comes behind its key's and a NUL.
    """
    return f"{_ADAPTER}{digest}\0"


def salt_key(salt: str) -> str:
    """A salt as the cache and its files name it: they must not give it away. An adapter has its number behind it."""
    key = hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()
    if not salt.startswith(_ADAPTER):
        return key
    digest, _, _ = salt.removeprefix(_ADAPTER).partition("\0")
    return f"{key}.{1 + int(digest[:8], 16) % (2**31 - 1)}"


def adapter_number(key: str) -> int | None:
    """A positive number of 31 bits that stands for the adapter of a key, None for the base."""
    _, _, number = key.partition(".")
    return int(number) if number else None
