"""Audio clips as mono samples at a model's rate: WAV by the standard library, other formats by PyAV."""

import struct
import wave
from io import BytesIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from protocol.failures import Code
from protocol.messages import Media
from worker.vision.clips import open_file, pyav
from worker.vision.images import refused

Samples = npt.NDArray[np.float32]

# What the standard library raises on files that are.
_BROKEN: Final = (wave.Error, EOFError, RuntimeError, struct.error, ValueError)
# Bytes of a sample.
_WIDEST: Final = 4
_WAV_INSTEAD: Final = "WAV files with 8, 16, 24 or 32 bits need nothing."


def read_audio(media: Media, rate: int, most_s: float) -> Samples:
    """Samples between -1 and 1 at `rate`, all channels mixed. Raises `RequestInvalid`."""
    is_wav = media.data[:4] == b"RIFF" and media.data[8:12] == b"WAVE"
    samples = _read_wav(media, rate, most_s) if is_wav else None
    if samples is None:
        samples = _read_file(media, rate, most_s)
    if not len(samples):
        raise refused("The audio clip holds no sound.", media.param, Code.INVALID_AUDIO)
    return samples


def _read_wav(media: Media, rate: int, most_s: float) -> Samples | None:
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
            raw = file.readframes(frames)
    except _BROKEN as error:
        if "unknown format" in str(error):
            return None
        reason = str(error) or "its parts do not fit together"
        raise refused(f"The WAV file is broken: {reason}.", media.param, Code.INVALID_AUDIO) from error
    whole = len(raw) - len(raw) % (width * channels)
    if own < 1 or not whole:
        return np.zeros(0, dtype=np.float32)
    return resampled(_levels(raw[:whole], width).reshape(-1, channels).mean(axis=1), own, rate)


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


def _read_file(media: Media, rate: int, most_s: float) -> Samples:
    av = pyav("Audio files", _WAV_INSTEAD, media.param)
    parts: list[npt.NDArray[Any]] = []
    count = 0
    try:
        with open_file(av, media.data) as container:
            if not container.streams.audio or container.streams.audio[0].codec_context is None:
                raise refused("The file holds no sound whose coding is known.", media.param, Code.INVALID_AUDIO)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
            for frame in container.decode(container.streams.audio[0]):
                for piece in resampler.resample(frame):
                    parts.append(piece.to_ndarray().reshape(-1))
                    count += len(parts[-1])
                _check_length(count / rate, most_s, media.param)
            parts += [piece.to_ndarray().reshape(-1) for piece in resampler.resample(None)]
    except (av.error.FFmpegError, ValueError) as error:
        raise refused(f"The audio clip cannot be read: {error}", media.param, Code.INVALID_AUDIO) from error
    return np.concatenate([*parts, np.zeros(0)]).astype(np.float32)


def _check_length(seconds: float, most_s: float, param: str) -> None:
    if seconds > most_s:
        message = f"The audio clip lasts {seconds:.1f} seconds; at most {most_s:g} are taken."
        raise refused(message, param, Code.INVALID_AUDIO)
