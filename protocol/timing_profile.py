"""Timing profile: times of a model measured by a worker on this machine, stored for its next start.

There is a file for each model, machine and form of its weights and KV. Workers write it, the gateway reads it. It
affects chunk sizes, draft widths, numbers of rows and estimates of loads, never a token.
"""

import os
import re
import tempfile
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.codec import UNREADABLE

# Environment variable with the folder of the profiles; if it is not set, nothing is stored.
FOLDER_ENV: Final = "MLXD_TIMINGS"
FORMAT: Final = 1
FILE_BYTES_MAX: Final = 256 * 1024
# Maximum number of stored profiles of one model; the oldest are deleted.
_FILES_MAX: Final = 4
_KEY_CHARS: Final = 16
_NAME_CHARS: Final = 160
# Upper bounds of the context bands for which times are stored separately; the last band has no upper bound.
CONTEXTS: Final = (4096, 16_384, 65_536)
_BANDS: Final = len(CONTEXTS)

Seconds = Annotated[float, Meta(gt=0, le=600)]
Band = Annotated[int, Meta(ge=0, le=_BANDS)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 20)]
Rows = Annotated[int, Meta(ge=1, le=1024)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
Text = Annotated[str, Meta(max_length=4096)]


class PassKind(StrEnum):
    """Kinds of forward passes: steps of rows that generate, chunks of prompts that are fused with a step, chunks with a
    pass of their own, and the passes of a draft model that reads prompts.
    """

    STEP = "step"
    FUSED = "fused"
    ALONE = "alone"
    READING = "reading"


class PassSeconds(msgspec.Struct, frozen=True):
    """Seconds of a pass at a context of this band, or those that a fused chunk adds to a step.

    `size` is the number of tokens per row of a step of `rows` rows, or the number of tokens of a chunk; chunks have 0
    rows.
    """

    band: Band
    kind: PassKind
    rows: Annotated[int, Meta(ge=0, le=1024)]
    size: Tokens
    seconds: Seconds


class LoadFacts(msgspec.Struct, frozen=True):
    """Times of the newest load, and memory after it: the weights, the process, KV per token, and memory per row in
    addition to its tokens.

    A model without KV has 0 for the last two.
    """

    seconds: Annotated[float, Meta(gt=0, le=86_400)]
    warm_up_s: Annotated[float, Meta(ge=0, le=86_400)]
    weights_bytes: Count
    footprint_bytes: Count
    token_bytes: Count = 0
    row_bytes: Count = 0


class MeasuredSpeed(msgspec.Struct, frozen=True):
    """Tokens a second of `size` decoding rows, or of a prompt of `size` tokens."""

    size: Tokens
    tokens_per_s: Rate


class Calibration(msgspec.Struct, frozen=True):
    """Results of a calibration, and the settings that follow from them.

    `max_running` is the smallest number of rows at which doubling gains less than a tenth. `buffer_bytes` is the
    fastest limit of MLX's free buffers.
    """

    at: float
    decode: Annotated[tuple[MeasuredSpeed, ...], Meta(max_length=32)]
    prefill: Annotated[tuple[MeasuredSpeed, ...], Meta(max_length=32)]
    max_running: Rows
    buffer_bytes: Count


class CalibrationResult(msgspec.Struct, frozen=True):
    """Line that `python -m worker.tools.calibrate` prints.

    `kind` is `decode` or `prefill`, with tokens a second of `size` rows or prompt tokens; `buffers`, where a limit of
    `size` bytes was the fastest; or `max_running`, which is the last line.
    """

    kind: str
    size: int
    tokens_per_s: float = 0.0


class TimingProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a profile file. Files of earlier versions have other times instead of `passes`, which are ignored."""

    format: int
    key: Text
    model: Text
    path: Text
    machine: Text
    written: float
    load: LoadFacts | None = None
    passes: Annotated[tuple[PassSeconds, ...], Meta(max_length=2048)] = ()
    calibration: Calibration | None = None


class UnusableProfile(Exception):
    """Raised when a timing profile cannot be used."""


_decoder = msgspec.json.Decoder(TimingProfile)


def profiles_dir(home: Path) -> Path:
    """Return the folder of the profiles of one home."""
    return home / "state" / "timings"


def move_former_folder(home: Path) -> None:
    """Move the profiles of a version that kept them in `state/wisdom`, unless this version already has some."""
    with suppress(OSError):
        (home / "state" / "wisdom").rename(profiles_dir(home))


def band_of(context: int) -> int:
    """Return the band that a context of `context` tokens falls into."""
    for band, end in enumerate(CONTEXTS):
        if context < end:
            return band
    return _BANDS


def file_of(folder: Path, model: str, key: str) -> Path:
    """Return the file of a model under this key."""
    return folder / f"{_stem(model)}-{key[:_KEY_CHARS]}.json"


def read(file: Path) -> TimingProfile:
    """Read a profile. Raises `UnusableProfile`, and `FileNotFoundError` or `NotADirectoryError` if there is none."""
    try:
        with file.open("rb") as stream:
            text = stream.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise UnusableProfile(f"it is longer than {FILE_BYTES_MAX} bytes")
        profile = _decoder.decode(text)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, *UNREADABLE) as error:
        raise UnusableProfile(str(error)) from None
    if profile.format != FORMAT:
        raise UnusableProfile(f"it has format {profile.format}, not {FORMAT}")
    return profile


def newest(folder: Path, model: str, path: str) -> TimingProfile | None:
    """Return the newest profile of a model that is loaded from `path`, with any key. Raises `UnusableProfile`."""
    files = _files(folder, model)
    profile = read(files[0]) if files else None
    return profile if profile is not None and (profile.model, profile.path) == (model, path) else None


def write(folder: Path, profile: TimingProfile) -> None:
    """Replace the profile under its key atomically. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = file_of(folder, profile.model, profile.key)
    descriptor, fresh = tempfile.mkstemp(prefix=f".{file.name}.", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(profile)))
        os.replace(fresh, file)
    except OSError:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    for old in _files(folder, profile.model)[_FILES_MAX:]:
        with suppress(OSError):
            old.unlink()


def _files(folder: Path, model: str) -> list[Path]:
    """Return the files of a model, newest first."""
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
