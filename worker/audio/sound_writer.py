"""Incremental encoding of speech to a file: WAV and PCM directly, other formats and speeds with PyAV."""

import struct
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final

import numpy as np

from worker.audio.transcriber import Samples
from worker.vision.sounds import resampled

PLAIN: Final = ("wav", "pcm")
# Container, codec and supported sample rates of each format; an empty tuple means any rate.
_CODED: Final[dict[str, tuple[str, str, tuple[int, ...]]]] = {
    "mp3": ("mp3", "libmp3lame", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("ogg", "libopus", (8000, 12000, 16000, 24000, 48000)),
    "aac": ("adts", "aac", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "flac": ("flac", "flac", ()),
}
# Sample rate of `pcm`, which has no header; OpenAI uses the same rate.
PCM_RATE: Final = 24_000
MISSING: Final = "PyAV is not installed; install it with: mlxctl setup audio"
# Value in a WAV header for a length that is not known at the beginning.
_UNKNOWN_LENGTH: Final = 0xFFFFFFFF
# Lowest speed of a single PyAV filter.
_MIN_FILTER_TEMPO: Final = 0.5


def has_pyav() -> bool:
    return find_spec("av") is not None


def formats() -> tuple[str, ...]:
    """Return the formats that this installation can write."""
    return (*PLAIN, *_CODED) if has_pyav() else PLAIN


class SoundWriter:
    """Encoder of mono samples at `rate` to a file. `add` and `end` return the file's new bytes.

    `speed` changes the playback speed without changing the pitch.
    """

    def __init__(self, format: str, rate: int, speed: float) -> None:
        self._rate = rate
        self._coder = _Coder(*_CODED[format], rate) if format in _CODED else None
        self._format = format
        self._tempo = _Tempo(rate, speed) if speed != 1.0 else None
        self._is_begun = False
        # Seconds written, at the playback speed.
        self.seconds = 0.0

    def add(self, samples: Samples) -> bytes:
        """Encode more samples, between -1 and 1."""
        if self._tempo is not None:
            samples = self._tempo.add(samples)
        return self._begin() + self._write(samples)

    def end(self) -> bytes:
        """Return the rest of the file."""
        rest = b"" if self._tempo is None else self._write(self._tempo.end())
        return self._begin() + rest + (b"" if self._coder is None else self._coder.end())

    def _begin(self) -> bytes:
        if self._is_begun or self._format != "wav":
            return b""
        self._is_begun = True
        shape = struct.pack("<IHHIIHH", 16, 1, 1, self._rate, 2 * self._rate, 2, 16)
        return (
            b"RIFF"
            + struct.pack("<I", _UNKNOWN_LENGTH)
            + b"WAVEfmt "
            + shape
            + b"data"
            + struct.pack("<I", _UNKNOWN_LENGTH)
        )

    def _write(self, samples: Samples) -> bytes:
        self.seconds += len(samples) / self._rate
        if not len(samples):
            return b""
        if self._format == "pcm":
            samples = resampled(samples.astype(np.float64), self._rate, PCM_RATE)
        whole = (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
        return whole.tobytes() if self._coder is None else self._coder.add(whole)


class _Coder:
    """PyAV encoder that writes into memory."""

    def __init__(self, container: str, codec: str, rates: tuple[int, ...], rate: int) -> None:
        self._av = import_module("av")
        self._out = BytesIO()
        self._rate = rate
        # The output must be the same in every run: a successor of this worker continues in the middle of the file.
        options = {"fflags": "+bitexact"}
        if container == "mp3":
            # An Xing header would have to be rewritten at the end, and an ID3 tag is not needed.
            options |= {"write_xing": "0", "id3v2_version": "0"}
        self._container = self._av.open(_Unseekable(self._out), "w", format=container, options=options)
        own = min((each for each in rates if each >= rate), default=rates[-1]) if rates else rate
        self._stream = self._container.add_stream(codec, rate=own, layout="mono")

    def add(self, samples: Any) -> bytes:
        frame = self._av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = self._rate
        self._container.mux(self._stream.encode(frame))
        return self._taken()

    def end(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._taken()

    def _taken(self) -> bytes:
        data = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return data


class _Unseekable:
    """File that only supports writing at its end, because bytes that were sent cannot be changed."""

    def __init__(self, out: BytesIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        return self._out.write(data)


class _Tempo:
    """Change of speed at the same pitch, with PyAV filters."""

    def __init__(self, rate: int, speed: float) -> None:
        self._av = import_module("av")
        self._rate = rate
        self._graph = self._av.filter.Graph()
        last = self._graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=f"1/{rate}")
        while speed < _MIN_FILTER_TEMPO:
            last = self._linked(last, _MIN_FILTER_TEMPO)
            speed /= _MIN_FILTER_TEMPO
        last = self._linked(last, speed)
        last.link_to(self._graph.add("abuffersink"))
        self._graph.configure()
        self._count = 0

    def _linked(self, last: Any, speed: float) -> Any:
        tempo = self._graph.add("atempo", f"{speed:.6f}")
        last.link_to(tempo)
        return tempo

    def add(self, samples: Samples) -> Samples:
        frame = self._av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._count
        self._count += len(samples)
        self._graph.push(frame)
        return self._pulled()

    def end(self) -> Samples:
        self._graph.push(None)
        return self._pulled()

    def _pulled(self) -> Samples:
        parts: list[Any] = []
        while True:
            try:
                parts.append(self._graph.pull().to_ndarray().reshape(-1))
            except (self._av.error.BlockingIOError, self._av.error.EOFError):
                return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)
