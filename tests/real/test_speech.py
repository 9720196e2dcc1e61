"""Whisper on sentences of eSpeak NG: mlx-audio's transcripts, containers, formats, silence, and a minute."""

import re
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.real import speech
from tests.real.figures import Figures
from tests.real.prepare import WHISPER_BASE, WHISPER_TINY_EN
from tests.real.serving import Served
from tests.real.speech import CONTAINERS, RATE, SENTENCES, Samples, contained, minute, speak, transcribe

pytestmark = pytest.mark.soak
MODELS = {"base": f'path = "{WHISPER_BASE}"', "tiny": f'path = "{WHISPER_TINY_EN}"'}
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TIME = r"\d\d:\d\d:\d\d[.,]\d{3}"


def ask(served: Served, samples: Samples, model: str = "base", container: str = "wav", **form: Any) -> httpx2.Response:
    files = {"file": (f"clip.{container}", contained(samples, container))}
    reply = served.client.post(TRANSCRIPTIONS, files=files, data={"model": model, **form})
    assert reply.status_code == 200, reply.text
    return reply


@pytest.fixture(scope="module")
def plain(served: Served) -> str:
    """The transcript of the sentence that is sent in every form."""
    return ask(served, speak(*SENTENCES[3]), language="en").json()["text"]


@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_transcripts_are_those_of_mlx_audio(served: Served, figures: Figures, language: str) -> None:
    errors = spoken_words = 0
    for text in (text for code, text in SENTENCES if code == language):
        heard = ask(served, speak(language, text), language=language).json()["text"]
        assert heard == transcribe(WHISPER_BASE, speak(language, text), language)
        wrong, count = speech.word_errors(heard, text)
        errors, spoken_words = errors + wrong, spoken_words + count

    figures.note(f"Whisper base, {language}: word errors", f"{errors} of {spoken_words}")
    assert errors / spoken_words < 0.6


def test_the_english_model_transcribes_as_mlx_audio(served: Served, figures: Figures) -> None:
    errors = spoken_words = 0
    for text in (text for code, text in SENTENCES if code == "en"):
        heard = ask(served, speak("en", text), "tiny").json()["text"]
        assert heard == transcribe(WHISPER_TINY_EN, speak("en", text), "en")
        wrong, count = speech.word_errors(heard, text)
        errors, spoken_words = errors + wrong, spoken_words + count

    figures.note("Whisper tiny.en: word errors", f"{errors} of {spoken_words}")
    assert errors / spoken_words < 0.6


@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_the_language_is_detected(served: Served, language: str) -> None:
    names = {"en": "english", "de": "german", "es": "spanish"}
    text = [text for code, text in SENTENCES if code == language][-1]
    answer = ask(served, speak(language, text), response_format="verbose_json").json()

    assert answer["language"] == names[language]


@pytest.mark.parametrize("container", CONTAINERS)
def test_each_container_has_nearly_the_same_words(served: Served, plain: str, container: str) -> None:
    heard = ask(served, speak(*SENTENCES[3]), container=container, language="en").json()["text"]

    wrong, count = speech.word_errors(heard, plain)
    # Lossy codecs change samples, and with them at most a word.
    assert wrong <= (0 if container in ("wav", "flac") else 1)
    assert count > 5


def test_words_have_times_in_order_within_the_clip(served: Served) -> None:
    samples = speak(*SENTENCES[2])
    form = {"response_format": "verbose_json", "timestamp_granularities[]": "word", "language": "en"}
    answer = ask(served, samples, **form).json()

    times = [time for word in answer["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert times[-1] <= len(samples) / RATE + 0.5
    assert speech.words(" ".join(word["word"] for word in answer["words"])) == speech.words(answer["text"])
    assert answer["duration"] == pytest.approx(len(samples) / RATE, abs=0.05)
    assert answer["usage"]


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_subtitles_have_the_text_between_times(served: Served, plain: str, form: str) -> None:
    lines = ask(served, speak(*SENTENCES[3]), language="en", response_format=form).text.splitlines()

    assert (lines[0] == "WEBVTT") is (form == "vtt")
    assert any(re.fullmatch(rf"{TIME} --> {TIME}", line) for line in lines)
    text = " ".join(line for line in lines if "-->" not in line and not line.isdigit() and line != "WEBVTT")
    assert speech.words(text) == speech.words(plain)


def test_a_stream_is_the_whole_transcript(served: Served, plain: str) -> None:
    streamed = ask(served, speak(*SENTENCES[3]), language="en", stream="true").text

    assert "transcript.text.done" in streamed
    assert plain in streamed


def test_silence_is_heard_as_by_mlx_audio(served: Served, figures: Figures) -> None:
    silence = np.zeros(4 * RATE, dtype=np.int16)
    heard = ask(served, silence, language="en").json()["text"]

    figures.note("Whisper base, silence", repr(heard))
    assert heard == transcribe(WHISPER_BASE, silence, "en")


def test_a_minute_is_transcribed_as_by_mlx_audio(served: Served, figures: Figures) -> None:
    samples, texts = minute()
    reply = ask(served, samples, language="en")
    heard = reply.json()["text"]

    wrong, count = speech.word_errors(heard, " ".join(texts))
    figures.note(f"Whisper base, {len(samples) / RATE:.0f} s: word errors", f"{wrong} of {count}")
    assert len(samples) / RATE > 60
    assert heard == transcribe(WHISPER_BASE, samples, "en")
