"""Sentences that eSpeak NG speaks, as samples and in containers; mlx-audio's own transcript; word error rates."""

import ctypes
import io
import json
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import av
import mlx.core as mx
import numpy as np
from scipy.signal import resample_poly

from tests.real.prepare import ESPEAK

Samples: TypeAlias = np.ndarray[Any, np.dtype[np.int16]]

RATE: Final = 16_000
# Ten sentences in three languages, by the code of eSpeak and of Whisper, which does not understand eSpeak's French.
SENTENCES: Final = (
    ("en", "The quick brown fox jumps over the lazy dog."),
    ("en", "Please send me the report before Friday morning."),
    ("en", "The train to London leaves at nine o'clock from platform four."),
    ("en", "We had a wonderful dinner at the restaurant near the river."),
    ("de", "Guten Morgen, wie geht es Ihnen heute?"),
    ("de", "Der Zug nach Berlin fährt um neun Uhr ab."),
    ("de", "Bitte schicken Sie mir den Bericht bis Freitag."),
    ("es", "Por favor, envíeme el informe antes del viernes."),
    ("es", "Me gustaría reservar una habitación para dos noches."),
    ("es", "Buenos días, me gustaría reservar una mesa para cuatro personas."),
)
# Codec, and its sample format, of each container that PyAV writes.
CONTAINERS: Final = {"wav": "pcm_s16le", "mp3": "libmp3lame", "flac": "flac", "webm": "libopus", "m4a": "aac"}
_WORDS_A_MINUTE: Final = 140


@cache
def _espeak() -> tuple[ctypes.CDLL, int]:
    """The library and its sample rate."""
    file = next(path for name in ("libespeak-ng.so", "libespeak-ng.dylib") if (path := ESPEAK / name).exists())
    library = ctypes.CDLL(str(file))
    synchronous = 2
    rate = library.espeak_Initialize(synchronous, 0, str(ESPEAK).encode(), 0)
    assert rate > 0, "eSpeak NG does not start"
    return library, rate


@cache
def speak(language: str, text: str) -> Samples:
    """A text in eSpeak's voice of a language."""
    library, rate = _espeak()
    spoken: list[Samples] = []
    form = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    def take(samples: Any, count: int, _events: int | None) -> int:
        if samples and count:
            spoken.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = form(take)
    library.espeak_SetSynthCallback(callback)
    assert library.espeak_SetVoiceByName(language.encode()) == 0, f"eSpeak NG has no voice {language}"
    words_a_minute = 1
    library.espeak_SetParameter(words_a_minute, _WORDS_A_MINUTE, 0)
    encoded, utf8 = text.encode(), 1
    assert library.espeak_Synth(encoded, len(encoded) + 1, 0, 0, 0, utf8, None, None) == 0
    library.espeak_Synchronize()
    whole = np.concatenate(spoken).astype(np.float64)
    return np.clip(resample_poly(whole, RATE, rate), -32768, 32767).astype(np.int16)


def minute() -> tuple[Samples, list[str]]:
    """About a minute of English, with pauses, and its sentences."""
    english = [text for language, text in SENTENCES if language == "en"]
    pause = np.zeros(RATE // 2, dtype=np.int16)
    parts: list[Samples] = []
    texts: list[str] = []
    while sum(map(len, parts)) < 60 * RATE:
        texts.append(english[len(texts) % len(english)])
        parts += [speak("en", texts[-1]), pause]
    return np.concatenate(parts), texts


def contained(samples: Samples, container: str) -> bytes:
    """The bytes of a file with these samples."""
    file = io.BytesIO()
    form = "mp4" if container == "m4a" else container
    with av.open(file, "w", format=form) as output:
        stream: Any = output.add_stream(CONTAINERS[container], rate=RATE)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(stream.format or "s16", "mono", stream.rate, frame_size=stream.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@cache
def _model(folder: Path) -> Any:
    from mlx_audio.stt.models.whisper import Model, ModelConfig

    model = Model(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())), dtype=mx.float32)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(model.sanitize(weights).items()))
    return Model.post_load_hook(model, folder)


def transcribe(folder: Path, samples: Samples, language: str) -> str:
    """The transcript of mlx-audio's own loop."""
    clip = samples.astype(np.float32) / 32768
    return str(_model(folder).generate(clip, language=language, verbose=None, fp16=False).text).strip()


def words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).lower()
    return re.findall(r"\w+", folded.replace("'", " ").replace("\u2019", " "))


def word_errors(heard: str, spoken: str) -> tuple[int, int]:
    """The edits of words from what was spoken to what was heard, and the number of spoken words."""
    ours, theirs = words(heard), words(spoken)
    row = list(range(len(ours) + 1))
    for at, word in enumerate(theirs, 1):
        before, row[0] = row[0], at
        for place, other in enumerate(ours, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != other))
    return row[-1], len(theirs)
