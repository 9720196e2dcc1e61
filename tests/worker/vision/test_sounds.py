"""Audio: WAV files of every width by the standard library, mono at the model's rate, and others by PyAV."""

import io
import random
import struct
import tracemalloc
import wave

import numpy as np
import numpy.typing as npt
import pytest

from protocol.failures import Code
from protocol.to_worker import Media
from tests.support.scale import scaled
from worker.errors import RequestInvalid
from worker.vision import clips, sounds
from worker.vision.sounds import read_audio, resampled

RATE = 16_000


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> npt.NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def wav(samples: npt.NDArray[np.float64], rate: int, width: int = 2, channels: int = 1) -> bytes:
    if width == 1:
        raw = ((samples + 1.0) * 127.5).astype(np.uint8).tobytes()
    else:
        wide = (samples * (2**31 - 1)).astype("<i4").reshape(-1, 1).view(np.uint8)
        raw = wide[:, 4 - width :].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(raw)
    return file.getvalue()


def media(data: bytes) -> Media:
    return Media("audio", b"", data, {}, "messages[0].content[0]")


def refusal(data: bytes, most_s: float = 30.0) -> tuple[Code, str, str | None]:
    with pytest.raises(RequestInvalid) as caught:
        read_audio(media(data), RATE, most_s)
    failure = caught.value.failure
    return failure.code, failure.message, failure.param


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width_give_the_same_sound(width: int) -> None:
    samples = read_audio(media(wav(tone(RATE), RATE, width)), RATE, 30.0)

    assert samples.dtype == np.float32
    assert np.abs(samples - tone(RATE)).max() < (0.02 if width == 1 else 1e-3)


def test_channels_are_mixed() -> None:
    left = tone(RATE)
    both = np.stack([left, -left], axis=1).reshape(-1)

    assert np.abs(read_audio(media(wav(both, RATE, 2, channels=2)), RATE, 30.0)).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_tone_keeps_its_pitch_and_length_at_another_rate(rate: int) -> None:
    samples = read_audio(media(wav(tone(rate), rate)), RATE, 30.0)

    assert len(samples) == RATE // 2
    assert np.abs(samples[800:-800] - tone(RATE)[800:-800]).max() < 0.01


def test_what_a_lower_rate_cannot_hold_is_left_out_and_not_folded_back() -> None:
    assert np.abs(resampled(tone(48_000, hertz=12_000.0), 48_000, 16_000)[800:-800]).max() < 0.01


def test_a_clip_that_is_too_long_is_refused_by_its_header() -> None:
    code, message, param = refusal(wav(tone(8_000, 3.0), 8_000), most_s=2.0)

    assert (code, param) == (Code.INVALID_AUDIO, "messages[0].content[0]")
    assert "3.0 seconds" in message


@pytest.mark.parametrize(
    "data", [b"RIFF\0\0\0\0WAVE", wav(tone(RATE), RATE)[:30], wav(np.zeros(0), RATE)], ids=["bare", "cut", "silent"]
)
def test_broken_and_empty_files_are_refused(data: bytes) -> None:
    assert refusal(data)[0] is Code.INVALID_AUDIO


@pytest.mark.parametrize("data", [b"ID3\x04", wav(tone(RATE), RATE).replace(b"\1\0\1\0", b"\3\0\1\0", 1)])
def test_other_formats_name_the_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(clips, "find_spec", lambda _: None)
    code, message, _ = refusal(data)

    assert code is Code.UNSUPPORTED_MODALITY
    assert "mlxd[media]" in message


def test_crafted_files_are_refused_and_raise_nothing_else() -> None:
    draw = random.Random(5)
    whole = wav(tone(RATE, 0.02), RATE)
    for _ in range(scaled(20_000, 2000)):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(12, 48)] = draw.choice((0, 1, 2, 5, 6, 40, 255, draw.randrange(256)))
        try:
            samples = read_audio(media(bytes(data)), RATE, 30.0)
        except RequestInvalid:
            continue
        assert samples.dtype == np.float32
        assert 0 < len(samples) <= 30 * RATE


def test_a_compressed_file_is_read_by_pyav() -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=44_100, layout="mono")
        frame = av.AudioFrame.from_ndarray((tone(44_100) * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = 44_100
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    samples = read_audio(media(file.getvalue()), RATE, 30.0)

    assert abs(len(samples) - RATE // 2) < 64
    assert np.abs(samples[800:-800] - tone(RATE)[800 : len(samples) - 800]).max() < 0.05
    assert refusal(b"ID3\x04" + struct.pack(">I", 7))[0] is Code.INVALID_AUDIO
    assert refusal(file.getvalue(), most_s=0.1)[0] is Code.INVALID_AUDIO


@pytest.mark.parametrize("own", [8_000, 44_100])
def test_a_long_wav_file_is_the_same_sound_read_in_parts(own: int) -> None:
    seconds = sounds.MAX_WHOLE_S + 33.25
    levels = tone(own, seconds) * np.linspace(0.2, 1.0, int(own * seconds))
    told: list[int] = []
    samples = read_audio(media(wav(levels, own)), RATE, 1e9, told.append)

    whole = resampled(levels, own, RATE)
    assert len(samples) == len(whole)
    assert np.abs(samples - whole)[100:-100].max() < 1e-3
    assert told[0] == samples.nbytes
    assert max(told) == samples.nbytes


def test_a_long_wav_file_takes_little_beside_its_samples() -> None:
    data = wav(tone(8_000, 900.0), 8_000, width=1)
    tracemalloc.start()
    try:
        samples = read_audio(media(data), RATE, 1e9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < samples.nbytes + (48 << 20)


def test_a_wav_file_of_one_frame_a_second_is_read_in_parts_too() -> None:
    data = wav(np.zeros(sounds.MAX_WHOLE_S * 8), 1, width=1)
    tracemalloc.start()
    try:
        samples = read_audio(media(data), RATE, 1e9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(samples) == sounds.MAX_WHOLE_S * 8 * RATE
    assert peak < samples.nbytes + (48 << 20)


def test_a_wav_file_that_is_cut_short_gives_what_it_has() -> None:
    data = wav(tone(8_000, 200.0), 8_000)
    samples = read_audio(media(data[: 44 + 2 * 8_000 * 70]), RATE, 1e9)
    assert len(samples) == 70 * RATE


@pytest.mark.parametrize("riff", [0, 36, 1000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("size", [0, 0x7FFFFFDB, 0xFFFFFFFF])
@pytest.mark.parametrize("before", [b"", b"LIST\x05\0\0\0INFOx\0"])
def test_a_recording_whose_sizes_were_never_corrected_goes_to_the_end(riff: int, size: int, before: bytes) -> None:
    whole = wav(tone(RATE), RATE)
    for silence in (b"", bytes(4_000)):
        sound = silence + whole[44:]
        data = b"RIFF" + struct.pack("<I", riff) + whole[8:36] + before + b"data" + struct.pack("<I", size) + sound
        samples = read_audio(media(data), RATE, 30.0)
        assert len(samples) == len(sound) // 2
        assert np.abs(samples[-len(tone(RATE)) :] - tone(RATE)).max() < 1e-3


@pytest.mark.parametrize("after", [b"", b"LIST\x04\0\0\0INFO", b"id3 \x03\0\0\0abc\0", b"id3 \x03\0\0\0abc"])
def test_chunks_behind_an_empty_recording_are_no_sound(after: bytes) -> None:
    assert "no sound" in refusal(wav(np.zeros(0), RATE) + after)[1]


def test_chunks_behind_the_sound_are_no_sound() -> None:
    assert len(read_audio(media(wav(tone(RATE), RATE) + b"LIST\x04\0\0\0INFO"), RATE, 30.0)) == len(tone(RATE))


def test_a_rate_of_zero_is_named() -> None:
    data = bytearray(wav(tone(RATE), RATE))
    data[24:28] = bytes(4)
    assert "rate is 0" in refusal(bytes(data))[1]


def test_what_a_reservation_raises_ends_the_reading() -> None:
    class Full(Exception):
        pass

    def refuse(_size: int) -> None:
        raise Full

    with pytest.raises(Full):
        read_audio(media(wav(tone(RATE), RATE)), RATE, 30.0, refuse)
