"""Wisdom: times of a model that a worker has measured on this machine, kept for its next start.

A file for each model, machine and form of its weights and KV. Workers write it, the gateway reads it. It decides sizes
of chunks, widths of drafts, numbers of rows and estimates of loads, never a token.
"""

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.codec import UNREADABLE

# The environment of a worker names the folder in which such files are kept; without it nothing is kept.
FOLDER_ENV: Final = "MLXD_WISDOM"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 256 * 1024
# Files of one model that are kept: those of earlier versions and forms go, the oldest first.
_FILES_MAX: Final = 4
_KEY_CHARS: Final = 16
_NAME_CHARS: Final = 160
# Contexts of which times are kept apart: below each of these, and from the last one on.
CONTEXTS: Final = (4096, 16_384, 65_536)
_BANDS: Final = len(CONTEXTS)

Seconds = Annotated[float, Meta(gt=0, le=600)]
Band = Annotated[int, Meta(ge=0, le=_BANDS)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]
Rows = Annotated[int, Meta(ge=1, le=1024)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
Text = Annotated[str, Meta(max_length=4096)]


class ChunkTime(msgspec.Struct, frozen=True):
    """Seconds that so many prompt tokens add to a tick at a context of this band: on its step, or in a pass of their
    own."""

    band: Band
    is_riding: bool
    tokens: Tokens
    seconds: Seconds


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step of so many rows and tokens a row at a context of this band."""

    band: Band
    rows: Rows
    width: Annotated[int, Meta(ge=1, le=64)]
    seconds: Seconds


class LoadFacts(msgspec.Struct, frozen=True):
    """Time of the newest load, and memory after it: of a token of KV, of a row beside its tokens, of the process.

    A model that keeps no KV has 0 for the first two.
    """

    seconds: Annotated[float, Meta(gt=0, le=86_400)]
    warm_up_s: Annotated[float, Meta(ge=0, le=86_400)]
    weights_bytes: Count
    footprint_bytes: Count
    token_bytes: Count = 0
    row_bytes: Count = 0


class MeasuredSpeed(msgspec.Struct, frozen=True):
    """Tokens a second of so many rows that generate, or of a prompt of so many tokens."""

    size: Tokens
    tokens_per_s: Rate


class Calibration(msgspec.Struct, frozen=True):
    """Speeds that were measured on purpose, and what follows from them.

    `max_running` is the smallest number of rows from which twice as many gain less than a tenth. `buffer_bytes` is the
    limit of MLX's free buffers that was the quickest.
    """

    at: float
    decode: Annotated[tuple[MeasuredSpeed, ...], Meta(max_length=32)]
    prefill: Annotated[tuple[MeasuredSpeed, ...], Meta(max_length=32)]
    max_running: Rows
    buffer_bytes: Count


class CalibrationResult(msgspec.Struct, frozen=True):
    """Line that `python -m worker.tools.calibrate` prints.

    `kind` is `decode` or `prefill`, with tokens a second of `size` rows or prompt tokens; `buffers`, of which `size`
    bytes were the quickest; or `max_running`, the last one.
    """

    kind: str
    size: int
    tokens_per_s: float = 0.0


class TimingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a file. `doubts` are starts in a row after which the times were found to be others."""

    format: int
    key: Text
    model: Text
    path: Text
    machine: Text
    written: float
    load: LoadFacts | None = None
    chunks: Annotated[tuple[ChunkTime, ...], Meta(max_length=256)] = ()
    steps: Annotated[tuple[StepTime, ...], Meta(max_length=1024)] = ()
    doubts: Annotated[int, Meta(ge=0, le=1)] = 0
    calibration: Calibration | None = None


class UnusableProfile(Exception):
    """A file of wisdom that cannot be used."""


_decoder = msgspec.json.Decoder(TimingProfile)


def wisdom_dir(home: Path) -> Path:
    """The folder of the files of one home."""
    return home / "state" / "wisdom"


def band_of(context: int) -> int:
    """The band of a context of so many tokens."""
    for band, end in enumerate(CONTEXTS):
        if context < end:
            return band
    return _BANDS


def file_of(folder: Path, model: str, key: str) -> Path:
    """The file of a model under this key."""
    return folder / f"{_stem(model)}-{key[:_KEY_CHARS]}.json"


def read(file: Path) -> TimingProfile:
    """Raises `UnusableProfile`, and `FileNotFoundError` or `NotADirectoryError` where there is none."""
    try:
        with file.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise UnusableProfile(f"it is longer than {FILE_BYTES_MAX} bytes")
        wisdom = _decoder.decode(text)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, *UNREADABLE) as error:
        raise UnusableProfile(str(error)) from None
    if wisdom.format != FORMAT:
        raise UnusableProfile(f"it has format {wisdom.format}, not {FORMAT}")
    return wisdom


def newest(folder: Path, model: str, path: str) -> TimingProfile | None:
    """Newest file of a model that is loaded from `path`, whatever its key. Raises `UnusableProfile`."""
    files = _files(folder, model)
    wisdom = read(files[0]) if files else None
    return wisdom if wisdom is not None and (wisdom.model, wisdom.path) == (model, path) else None


def write(folder: Path, wisdom: TimingProfile) -> None:
    """Put it in place of what was kept under its key; at no time is there half a file. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = file_of(folder, wisdom.model, wisdom.key)
    descriptor, fresh = tempfile.mkstemp(prefix=f".{file.name}.", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(wisdom)))
        os.replace(fresh, file)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    for old in _files(folder, wisdom.model)[_FILES_MAX:]:
        with suppress(OSError):
            old.unlink()


def _files(folder: Path, model: str) -> list[Path]:
    """Of a model, the newest first."""
    name = re.compile(re.escape(_stem(model)) + rf"-[0-9a-f]{{{_KEY_CHARS}}}\.json")
    times: dict[Path, int] = {}
    with suppress(OSError):
        for file in folder.iterdir():
            if name.fullmatch(file.name):
                with suppress(OSError):
                    times[file] = file.stat().st_mtime_ns
    return sorted(times, key=lambda file: -times[file])


def _stem(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", model)[:_NAME_CHARS].lstrip(".")
