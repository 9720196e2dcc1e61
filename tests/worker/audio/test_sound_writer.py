"""Files of speech in every format, as they are read again, whole and in pieces."""

import numpy as np
import pytest

from protocol.to_worker import Media
from worker.audio.sound_writer import PCM_RATE, SoundWriter, formats
from worker.vision.sounds import read_audio

RATE = 32_000


def samples(seconds: float, hertz: float = 440.0) -> np.ndarray:
    at = np.arange(int(seconds * RATE)) / RATE
    return (0.5 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def written(format: str, speed: float = 1.0, pieces: int = 3) -> bytes:
    writer = SoundWriter(format, RATE, speed)
    return b"".join([*(writer.add(part) for part in np.array_split(samples(1.5), pieces)), writer.end()])


def read(data: bytes) -> np.ndarray:
    return read_audio(Media("audio", b"", data), 16_000, 60.0)


def pitch(heard: np.ndarray, rate: int = 16_000) -> float:
    spectrum = np.abs(np.fft.rfft(heard))
    return float(np.argmax(spectrum)) * rate / len(heard)


@pytest.mark.parametrize(
    ("format", "beginning"),
    [("wav", b"RIFF"), ("mp3", b"\xff"), ("opus", b"OggS"), ("aac", b"\xff"), ("flac", b"fLaC")],
)
def test_a_file_in_pieces_is_the_tone_that_was_written(format: str, beginning: bytes) -> None:
    assert format in formats()
    data = written(format)
    assert data.startswith(beginning)
    heard = read(data)
    # Encoders put some silence in front and behind.
    assert 1.49 < len(heard) / 16_000 < 1.65
    assert abs(pitch(heard) - 440.0) < 2.0
    assert data == written(format), "a successor goes on in the middle of the same bytes"


def test_pcm_has_openais_rate_and_no_header() -> None:
    heard = np.frombuffer(written("pcm"), "<i2") / 32768
    assert len(heard) == 1.5 * PCM_RATE
    assert abs(pitch(heard, PCM_RATE) - 440.0) < 2.0


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.5, 4.0])
def test_another_speed_keeps_the_pitch(speed: float) -> None:
    heard = read(written("wav", speed))
    assert len(heard) / 16_000 == pytest.approx(1.5 / speed, rel=0.12)
    assert pitch(heard) == pytest.approx(440.0, rel=0.02)


def test_a_file_of_nothing_is_a_file() -> None:
    writer = SoundWriter("wav", RATE, 1.0)
    assert writer.end().startswith(b"RIFF")
    assert writer.end() == b""
