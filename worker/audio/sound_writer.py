"""Speech as the bytes of a file, piece by piece: WAV and PCM by ourselves, other formats and other speeds by PyAV."""

import struct
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final

import numpy as np

from worker.audio.transcriber import Samples
from worker.vision.sounds import resampled

PLAIN: Final = ("wav", "pcm")
# Container and codec of each, and the rates that its codec takes; none is any.
_CODED: Final[dict[str, tuple[str, str, tuple[int, ...]]]] = {
    "mp3": ("mp3", "libmp3lame", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "opus": ("ogg", "libopus", (8000, 12000, 16000, 24000, 48000)),
    "aac": ("adts", "aac", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "flac": ("flac", "flac", ()),
}
# Samples a second of `pcm`, which names none: OpenAI's.
PCM_RATE: Final = 24_000
MISSING: Final = "PyAV is not installed; install it with: mlxctl setup audio"
# Of a WAV file whose length is not known when it begins.
_UNKNOWN: Final = 0xFFFFFFFF
# What one filter of PyAV does at once.
_TEMPO_LEAST: Final = 0.5


def has_pyav() -> bool:
    return find_spec("av") is not None


def formats() -> tuple[str, ...]:
    """Formats that can be written here."""
    return (*PLAIN, *_CODED) if has_pyav() else PLAIN


class SoundWriter:
    """A file of mono samples at `rate`. `add` and `end` return what of it is new.

    `speed` is how many times as fast it plays, at the same pitch.
    """

    def __init__(self, format: str, rate: int, speed: float) -> None:
        self._rate = rate
        self._coder = _Coder(*_CODED[format], rate) if format in _CODED else None
        self._format = format
        self._tempo = _Tempo(rate, speed) if speed != 1.0 else None
        self._is_begun = False
        # Of what was written, at the speed that it plays.
        self.seconds = 0.0

    def add(self, samples: Samples) -> bytes:
        """Take more samples, between -1 and 1."""
        if self._tempo is not None:
            samples = self._tempo.add(samples)
        return self._begin() + self._write(samples)

    def end(self) -> bytes:
        """The rest of the file."""
        rest = b"" if self._tempo is None else self._write(self._tempo.end())
        return self._begin() + rest + (b"" if self._coder is None else self._coder.end())

    def _begin(self) -> bytes:
        if self._is_begun or self._format != "wav":
            return b""
        self._is_begun = True
        shape = struct.pack("<IHHIIHH", 16, 1, 1, self._rate, 2 * self._rate, 2, 16)
        return b"RIFF" + struct.pack("<I", _UNKNOWN) + b"WAVEfmt " + shape + b"data" + struct.pack("<I", _UNKNOWN)

    def _write(self, samples: Samples) -> bytes:
        self.seconds += len(samples) / self._rate
        if not len(samples):
            return b""
        if self._format == "pcm":
            samples = resampled(samples.astype(np.float64), self._rate, PCM_RATE)
        whole = (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
        return whole.tobytes() if self._coder is None else self._coder.add(whole)


class _Coder:
    """An encoder of PyAV that writes into memory."""

    def __init__(self, container: str, codec: str, rates: tuple[int, ...], rate: int) -> None:
        self._av = import_module("av")
        self._out = BytesIO()
        self._rate = rate
        # Without what differs from run to run: a successor of this worker goes on in the middle of the file.
        options = {"fflags": "+bitexact"}
        if container == "mp3":
            # Neither a length in front, which would have to be written at the end, nor a tag.
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
    """A file that can be written alone: what has been sent cannot be changed."""

    def __init__(self, out: BytesIO) -> None:
        self._out = out

    def write(self, data: bytes) -> int:
        return self._out.write(data)


class _Tempo:
    """Another speed at the same pitch, by filters of PyAV."""

    def __init__(self, rate: int, speed: float) -> None:
        self._av = import_module("av")
        self._rate = rate
        self._graph = self._av.filter.Graph()
        first = last = self._graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=f"1/{rate}")
        while speed < _TEMPO_LEAST:
            last = self._linked(last, _TEMPO_LEAST)
            speed /= _TEMPO_LEAST
        last = self._linked(last, speed)
        last.link_to(self._graph.add("abuffersink"))
        self._graph.configure()
        self._first = first
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
