"""Audio clips as mono samples at a model's rate: the standard library decodes WAV, PyAV the other formats."""

import struct
import wave
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from protocol.failures import Code
from protocol.to_worker import Media
from worker.vision.clips import open_file, pyav, reason_of
from worker.vision.images import refused

Samples = npt.NDArray[np.float32]
# Callback with the size of the samples in bytes. It is called before they are allocated and while a clip is decoded,
# and may raise.
Reserve = Callable[[int], None]

# Errors that the standard library raises for broken files.
_BROKEN: Final = (wave.Error, EOFError, RuntimeError, struct.error, ValueError)
_MAX_SAMPLE_BYTES: Final = 4
_WAV_INSTEAD: Final = "WAV files with 8, 16, 24 or 32 bits need nothing."
# Maximum seconds of a WAV file that is read at once, because the arithmetic takes several times the memory of the
# samples.
MAX_WHOLE_S: Final = 60
# Approximate number of frames in a part of a file that is too long to be read at once; parts are whole seconds long.
_PART_FRAMES: Final = 1 << 19
_PART_MIN_S: Final = 4
# Seconds by which parts overlap on both sides, for resampling.
_OVERLAP_S: Final = 1
# Minimum number of bytes per second of sound. Only a silent file, or a file with a wrong header, has fewer.
_MIN_BYTES_PER_SECOND: Final = 64
# Minimum number of samples by which the array grows, and number of samples between two calls of `Reserve`.
_GROWTH_SAMPLES: Final = 1 << 18


def read_audio(media: Media, rate: int, most_s: float, reserve: Reserve = lambda _size: None) -> Samples:
    """Decode samples between -1 and 1 at `rate`, with all channels mixed. Raises `RequestInvalid`, and the errors of
    `reserve`.

    Memory beyond the reserved bytes is bounded, regardless of the length of the clip.
    """
    samples = _read_wav(media, rate, most_s, reserve) if is_wav(media.data) else None
    if samples is None:
        samples = _read_file(media, rate, most_s, reserve)
    if not len(samples):
        raise refused("The audio clip holds no sound.", media.param, Code.INVALID_AUDIO)
    return samples


def is_wav(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


class _SampleBuffer:
    """Samples in one array, whose memory is reserved before it is allocated. `expected` is the likely number of
    samples.
    """

    def __init__(self, reserve: Reserve, expected: int) -> None:
        self._reserve = reserve
        self._samples = np.empty(0, dtype=np.float32)
        self._reported = 0
        self.count = 0
        if expected:
            self._grow(expected)

    def add(self, piece: npt.NDArray[Any]) -> None:
        end = self.count + len(piece)
        if end > len(self._samples):
            self._grow(max(end, len(self._samples) * 9 // 8, len(self._samples) + _GROWTH_SAMPLES))
        elif end - self._reported >= _GROWTH_SAMPLES:
            self._report()
        self._samples[self.count : end] = piece
        self.count = end

    def samples(self) -> Samples:
        """Return all samples. The recording must not be used afterwards."""
        self._samples.resize(self.count, refcheck=False)
        return self._samples

    def _grow(self, length: int) -> None:
        self._reported = self.count
        self._reserve(length * self._samples.itemsize)
        self._samples.resize(length, refcheck=False)

    def _report(self) -> None:
        self._reported = self.count
        self._reserve(self._samples.nbytes)


def _read_wav(media: Media, rate: int, most_s: float, reserve: Reserve) -> Samples | None:
    """Decode a WAV file; return None if the standard library does not support its coding."""
    header, sound = _wav_parts(media.data)
    try:
        with wave.open(BytesIO(header)) as file:
            own, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            if own < 1:
                raise wave.Error("its rate is 0")
            if width > _MAX_SAMPLE_BYTES or not channels:
                message = (
                    f"The WAV file has {8 * width} bits and {channels} channels; "
                    f"up to {8 * _MAX_SAMPLE_BYTES} bits are taken."
                )
                raise refused(message, media.param, Code.INVALID_AUDIO)
            block = width * channels
            frames = len(sound) // block
            _check_length(frames / own, most_s, media.param)
            if not frames:
                return np.zeros(0, dtype=np.float32)
            recording = _SampleBuffer(reserve, round(frames * rate / own))
            for part in _parts(frames, own, rate, _OVERLAP_S if own != rate else 0):
                begin, end = part.first - part.before, part.first + part.frames + part.after
                levels = _levels(sound[begin * block : end * block], width).reshape(-1, channels).mean(axis=1)
                recording.add(part.of(levels, own, rate))
    except _BROKEN as error:
        if "unknown format" in str(error):
            return None
        reason = str(error) or "its parts do not fit together"
        raise refused(f"The WAV file is broken: {reason}.", media.param, Code.INVALID_AUDIO) from error
    return recording.samples()


def _wav_parts(data: bytes) -> tuple[bytes, memoryview]:
    """Return a WAV header that the standard library reads, and the sound.

    Only the bytes that are there count, because a recorder that is killed or writes to a pipe never corrects the sizes
    in its header: a size of 0 before bytes that are no further chunks, or a size beyond the end, means up to the end.
    """
    view, header, sound = memoryview(data), b"", memoryview(b"")
    for name, begin, size in _chunks(view, 12):
        if name == b"data":
            is_unknown = size == 0 and not _ends_with_chunks(view, begin)
            sound = view[begin:] if is_unknown else view[begin : begin + size]
            header += b"data" + bytes(4)
            break
        if name == b"fmt ":
            header += view[begin - 8 : begin + size + size % 2]
    return b"RIFF" + struct.pack("<I", 4 + len(header)) + b"WAVE" + header, sound


def _chunks(view: memoryview, at: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, the begin and the stated size of each chunk, up to bytes that are none."""
    while at + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, at)
        if not name.isascii() or not name.decode().isprintable():
            return
        yield name, at + 8, size
        at += 8 + size + size % 2


def _ends_with_chunks(view: memoryview, at: int) -> bool:
    """Return whether the rest of a file is a sequence of whole chunks, or nothing."""
    end = at
    for _, begin, size in _chunks(view, at):
        end = begin + size
    return len(view) - 1 <= end <= len(view)  # The last chunk may be padded.


class _Part(NamedTuple):
    """Frames of a clip that are resampled together, and the number of extra frames decoded before and after them."""

    first: int
    frames: int
    before: int
    after: int

    def of(self, levels: npt.NDArray[np.float64], own: int, rate: int) -> Samples:
        """Return the samples of the part itself. The extra frames at both sides are faded before resampling, because a
        hard edge would ring.
        """
        if len(levels) <= self.before:
            return np.zeros(0, dtype=np.float32)
        if self.before:
            levels[: self.before] *= _fade(self.before)
        if self.after and len(levels) == self.before + self.frames + self.after:
            levels[-self.after :] *= _fade(self.after)[::-1]
        start = self.before // own * rate
        return resampled(levels, own, rate)[start : start + round(self.frames * rate / own)]


def _parts(frames: int, own: int, rate: int, overlap_s: int) -> Iterator[_Part]:
    """Split a clip into parts of whole seconds, except the last part; a short clip is one part."""
    overlap = overlap_s * own
    length = max(_PART_MIN_S, _PART_FRAMES // max(own, rate)) * own if frames > MAX_WHOLE_S * own else frames
    first = 0
    while first < frames:
        is_last = frames - first - length <= overlap
        count = frames - first if is_last else length
        yield _Part(first, count, overlap if first else 0, 0 if is_last else overlap)
        first += count


def _fade(length: int) -> npt.NDArray[np.float64]:
    """Return weights for `length` frames: a ramp from 0 to 1 in the first half, then 1."""
    rise = np.sin(np.linspace(0.0, np.pi / 2, length // 2)) ** 2
    return np.concatenate([rise, np.ones(length - length // 2)])


def _levels(raw: memoryview, width: int) -> npt.NDArray[np.float64]:
    if width == 1:
        return np.frombuffer(raw, dtype=np.uint8) / 128.0 - 1.0
    if width == 3:
        # 24-bit samples become the upper bytes of 32-bit samples.
        wide = np.zeros((len(raw) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2.0**31
    return np.frombuffer(raw, dtype=f"<i{width}") / 2.0 ** (8 * width - 1)


def resampled(samples: npt.NDArray[np.float64], own: int, rate: int) -> Samples:
    """Resample band-limited: the spectrum is cut or padded at half of the lower rate."""
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
            likely_s = min(_header_s(av, container, stream), most_s, len(media.data) / _MIN_BYTES_PER_SECOND)
            recording = _SampleBuffer(reserve, int(likely_s * rate))
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


def _header_s(av: Any, container: Any, stream: Any) -> float:
    """Return the length in a file's header, which may be wrong; 0 if the header has none, as in a live recording."""
    if stream.duration and stream.time_base:
        return max(0.0, float(stream.duration * stream.time_base))
    return max(0.0, (container.duration or 0) / av.time_base)


def _check_length(seconds: float, most_s: float, param: str) -> None:
    if seconds > most_s:
        message = f"The audio clip lasts {seconds:.1f} seconds; at most {most_s:g} are taken."
        raise refused(message, param, Code.INVALID_AUDIO)
