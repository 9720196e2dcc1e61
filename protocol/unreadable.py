"""Errors of msgspec for bytes that are no message: not its form, not UTF-8, or too deep."""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
