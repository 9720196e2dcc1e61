"""Audio clips as mono samples at a model's rate: WAV by the standard library, other formats by PyAV."""

import struct
import wave
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.failures import Code
from protocol.messages import Media
from worker.vision.clips import open_file, pyav, reason_of
from worker.vision.images import refused

Samples = npt.NDArray[np.float32]
# Told how many bytes the samples will have, before they are made, and again while a clip is decoded. May raise.
Reserve = Callable[[int], None]

# What the standard library raises on files that are.
_BROKEN: Final = (wave.Error, EOFError, RuntimeError, struct.error, ValueError)
# Bytes of a sample.
_WIDEST: Final = 4
_WAV_INSTEAD: Final = "WAV files with 8, 16, 24 or 32 bits need nothing."
# A longer WAV file is read in parts of whole seconds with about so many frames: arithmetic takes some times the memory
# of its samples. Each is resampled with so many seconds beside it.
WHOLE_S: Final = 60
_PART_FRAMES: Final = 1 << 19
_PART_LEAST_S: Final = 4
_BESIDE_S: Final = 1
# A file has more for a second of sound, unless it is silent or lies about its length.
_LEAST_BYTES_A_SECOND: Final = 64
# Samples by which an array grows at least, and after which `Reserve` is told again.
_STRIDE: Final = 1 << 18


def read_audio(media: Media, rate: int, most_s: float, reserve: Reserve = lambda _size: None) -> Samples:
    """Samples between -1 and 1 at `rate`, all channels mixed. Raises `RequestInvalid`, and what `reserve` raises.

    What it takes beside what it reserves is bounded, however long the clip is.
    """
    samples = _read_wav(media, rate, most_s, reserve) if is_wav(media.data) else None
    if samples is None:
        samples = _read_file(media, rate, most_s, reserve)
    if not len(samples):
        raise refused("The audio clip holds no sound.", media.param, Code.INVALID_AUDIO)
    return samples


def is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


class _Recording:
    """Samples in one array, for which room is reserved before it is made. `expected` is how many may come."""

    def __init__(self, reserve: Reserve, expected: int) -> None:
        self._reserve = reserve
        self._samples = np.empty(0, dtype=np.float32)
        self._told = 0
        self.count = 0
        if expected:
            self._grow(expected)

    def add(self, piece: npt.NDArray[Any]) -> None:
        end = self.count + len(piece)
        if end > len(self._samples):
            self._grow(max(end, len(self._samples) * 9 // 8, len(self._samples) + _STRIDE))
        elif end - self._told >= _STRIDE:
            self._tell()
        self._samples[self.count : end] = piece
        self.count = end

    def samples(self) -> Samples:
        """All of them. It is of no use afterwards."""
        self._samples.resize(self.count, refcheck=False)
        return self._samples

    def _grow(self, length: int) -> None:
        self._told = self.count
        self._reserve(length * self._samples.itemsize)
        self._samples.resize(length, refcheck=False)

    def _tell(self) -> None:
        self._told = self.count
        self._reserve(self._samples.nbytes)


def _read_wav(media: Media, rate: int, most_s: float, reserve: Reserve) -> Samples | None:
    """None for a WAV file whose coding the standard library does not know."""
    try:
        with wave.open(BytesIO(media.data)) as file:
            own, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            if width > _WIDEST or not channels:
                message = (
                    f"The WAV file has {8 * width} bits and {channels} channels; up to {8 * _WIDEST} bits are taken."
                )
                raise refused(message, media.param, Code.INVALID_AUDIO)
            # A file that was written as a stream names more frames than there are.
            frames = min(file.getnframes(), len(media.data) // (width * channels))
            _check_length(frames / max(own, 1), most_s, media.param)
            if own < 1 or not frames:
                return np.zeros(0, dtype=np.float32)
            recording = _Recording(reserve, round(frames * rate / own))
            for part in _parts(frames, own, rate, _BESIDE_S if own != rate else 0):
                file.setpos(part.first - part.before)
                raw = file.readframes(part.before + part.frames + part.after)
                whole = len(raw) - len(raw) % (width * channels)
                levels = _levels(raw[:whole], width).reshape(-1, channels).mean(axis=1)
                recording.add(part.of(levels, own, rate))
    except _BROKEN as error:
        if "unknown format" in str(error):
            return None
        reason = str(error) or "its parts do not fit together"
        raise refused(f"The WAV file is broken: {reason}.", media.param, Code.INVALID_AUDIO) from error
    return recording.samples()


class _Part(NamedTuple):
    """Frames of a clip that are resampled at once, and how many are read before and after them."""

    first: int
    frames: int
    before: int
    after: int

    def of(self, levels: npt.NDArray[np.float64], own: int, rate: int) -> Samples:
        """Samples of the frames alone. What is beside them fades out: an edge would ring."""
        if len(levels) <= self.before:
            return np.zeros(0, dtype=np.float32)
        if self.before:
            levels[: self.before] *= _fade(self.before)
        if self.after and len(levels) == self.before + self.frames + self.after:
            levels[-self.after :] *= _fade(self.after)[::-1]
        start = self.before // own * rate
        return resampled(levels, own, rate)[start : start + round(self.frames * rate / own)]


def _parts(frames: int, own: int, rate: int, beside_s: int) -> Iterator[_Part]:
    """A clip of so many frames in parts of whole seconds, but for the last; one that is short is one part."""
    beside = beside_s * own
    length = max(_PART_LEAST_S, _PART_FRAMES // max(own, rate)) * own if frames > WHOLE_S * own else frames
    first = 0
    while first < frames:
        is_last = frames - first - length <= beside
        count = frames - first if is_last else length
        yield _Part(first, count, beside if first else 0, 0 if is_last else beside)
        first += count


def _fade(length: int) -> npt.NDArray[np.float64]:
    """A rise from 0 to 1 in the first half of so many frames."""
    rise = np.sin(np.linspace(0.0, np.pi / 2, length // 2)) ** 2
    return np.concatenate([rise, np.ones(length - length // 2)])


def _levels(raw: bytes, width: int) -> npt.NDArray[np.float64]:
    if width == 1:
        return np.frombuffer(raw, dtype=np.uint8) / 128.0 - 1.0
    if width == 3:
        # As the upper bytes of 32-bit samples.
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(raw, dtype=f"<i{width}") / 2.0 ** (8 * width - 1)


def resampled(samples: npt.NDArray[np.float64], own: int, rate: int) -> Samples:
    """Samples at another rate, band-limited: the spectrum is cut, or padded, at the lower of both."""
    if own == rate or not len(samples):
        return samples.astype(np.float32)
    length = max(1, round(len(samples) * rate / own))
    spectrum = np.fft.rfft(samples)
    bands = length // 2 + 1
    kept = np.zeros(bands, dtype=spectrum.dtype)
    kept[: min(bands, len(spectrum))] = spectrum[:bands]
    return (np.fft.irfft(kept, length) * (length / len(samples))).astype(np.float32)


def _read_file(media: Media, rate: int, most_s: float, reserve: Reserve) -> Samples:
    av = pyav("Audio files", _WAV_INSTEAD, media.param)
    try:
        with open_file(av, media.data) as container:
            if not container.streams.audio or container.streams.audio[0].codec_context is None:
                raise refused("The file holds no sound whose coding is known.", media.param, Code.INVALID_AUDIO)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
            stream = container.streams.audio[0]
            likely_s = min(_told_s(av, container, stream), most_s, len(media.data) / _LEAST_BYTES_A_SECOND)
            recording = _Recording(reserve, int(likely_s * rate))
            for frame in container.decode(stream):
                for piece in resampler.resample(frame):
                    recording.add(piece.to_ndarray().reshape(-1))
                _check_length(recording.count / rate, most_s, media.param)
            for piece in resampler.resample(None):
                recording.add(piece.to_ndarray().reshape(-1))
    except (av.error.FFmpegError, ValueError) as error:
        message = f"The audio clip cannot be read: {reason_of(error)}."
        raise refused(message, media.param, Code.INVALID_AUDIO) from error
    return recording.samples()


def _told_s(av: Any, container: Any, stream: Any) -> float:
    """Length of a file as it says, which need not be true; 0 where it says none, as one that was recorded live."""
    if stream.duration and stream.time_base:
        return max(0.0, float(stream.duration * stream.time_base))
    return max(0.0, (container.duration or 0) / av.time_base)


def _check_length(seconds: float, most_s: float, param: str) -> None:
    if seconds > most_s:
        message = f"The audio clip lasts {seconds:.1f} seconds; at most {most_s:g} are taken."
        raise refused(message, param, Code.INVALID_AUDIO)
