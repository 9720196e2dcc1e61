"""Line numbers of the keys in a TOML file, and readable durations and sizes. `tomllib` provides neither."""

import re
import tomllib
import unicodedata
from typing import Final

_PART: Final = r"(?:[\w-]+|\"[^\"]*\"|'[^']*')"
_DOTTED: Final = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER: Final = re.compile(rf"^\s*\[\[?\s*(?P<keys>{_DOTTED})\s*\]\]?\s*(?:#.*)?$")
_ASSIGN: Final = re.compile(rf"^\s*(?P<keys>{_DOTTED})\s*=")
_KEY: Final = re.compile(_PART)
_INLINE: Final = re.compile(rf"(?P<key>{_PART})\s*=(?!=)")
_AT_LINE: Final = re.compile(r"\s*\(at line (\d+), column \d+\)$")
_NUMBER_UNIT: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES_BINARY: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_duration(text: str) -> float:
    """Parse `30s`, `5m`, `1.5h`, `250ms`, `2d`, or plain seconds. Raises `ValueError`."""
    match = _NUMBER_UNIT.match(text)
    unit = _SECONDS.get((match[2] or "s").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a duration; write it like 30s, 5m or 2h")
    return float(match[1]) * unit


def parse_size(text: str) -> int:
    """Parse `32MiB`, `8GB`, or plain bytes. Raises `ValueError`."""
    match = _NUMBER_UNIT.match(text)
    unit = (_BYTES | _BYTES_BINARY).get((match[2] or "b").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 512KiB, 32MiB or 8GiB")
    return int(float(match[1]) * unit)


def control_character(text: str) -> str:
    """Return the first control character or line separator of a text as `U+000A`; empty if there is none."""
    found = next((char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")), None)
    return "" if found is None else f"U+{ord(found):04X}"


class Locator:
    """Finds the lines of keys in a TOML text. It serves for error messages; multi-line strings may mislead it."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.match(line):
                table = _keys(header["keys"])
                self._add(table, number)
            elif assign := _ASSIGN.match(line):
                key = (*table, *_keys(assign["keys"]))
                self._add(key, number)
                for inline in _INLINE.finditer(line, assign.end()):
                    self._add((*key, *_keys(inline["key"])), number)

    def _add(self, key: tuple[str, ...], number: int) -> None:
        for length in range(1, len(key) + 1):
            self._lines.setdefault(key[:length], number)

    def line(self, *spellings: tuple[str, ...]) -> int | None:
        """Return the line of the first of `spellings` that exists, or else of the nearest table around the last."""
        for key in spellings:
            if key in self._lines:
                return self._lines[key]
        key = spellings[-1]
        while key and key not in self._lines:
            key = key[:-1]
        return self._lines.get(key)

    @staticmethod
    def syntax_error(error: tomllib.TOMLDecodeError) -> tuple[str, int | None]:
        """Split an error message of `tomllib` into the error and its line."""
        text = str(error)
        match = _AT_LINE.search(text)
        return (text[: match.start()], int(match[1])) if match else (text, None)


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in _KEY.findall(dotted))
