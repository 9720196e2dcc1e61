"""Intake of audio requests: validates and decodes each request and makes a job of it, off the loop's thread."""

import hashlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final

import numpy as np
from msgspec import structs

from protocol import from_worker
from protocol.failures import Code
from protocol.from_worker import SPOKEN_TOKENS_PER_S, TRANSCRIBED_TOKENS_PER_S, Tokenized, TranscriptPart
from protocol.to_worker import Detokenize, Generate, Media, SpeechPrompt, Tokenize, TranscribePrompt
from worker.audio import sound_writer
from worker.audio.audio_jobs import AudioJob, AudioPiece, PendingClip
from worker.audio.audio_model import AudioModel
from worker.audio.sound_writer import SoundWriter
from worker.audio.speaker import Instructions, Speaker
from worker.audio.transcriber import AddedTokens, AudioWindow, Check, Transcriber
from worker.errors import RequestInvalid
from worker.vision.sounds import Reserve, is_wav, read_audio

# Minimum length of a clip: a shorter clip contains no word, and is too short for a window.
_MIN_CLIP_S: Final = 0.1
_NOT_FINITE: Final = "the model gave no number for a part of the speech"
# Approximate number of characters per token, for the usage report of speech.
_CHARS_PER_TOKEN: Final = 4
# Maximum time until a clip is decoded, for a request without a deadline.
_DECODE_WAIT_S: Final = 600.0


class AudioIntake:
    """Converter of requests to jobs, for one loaded model. `check` is the loop's method."""

    def __init__(self, model: AudioModel, check: Check) -> None:
        self._model = model
        self._check = check

    def job(self, request: Generate, arrived: float) -> AudioJob | PendingClip:
        """Return a validated job, or the clip from which it will be made. Takes little time. Raises
        `RequestInvalid`.
        """
        match request.prompt, self._model.transcriber, self._model.speaker:
            case TranscribePrompt() as prompt, transcriber, _ if transcriber is not None:
                return self._transcription(request, arrived, prompt, transcriber)
            case SpeechPrompt() as prompt, _, speaker if speaker is not None:
                return self._spoken(request, arrived, prompt, speaker)
            case _:
                raise self._wrong_kind()

    def job_now(self, request: Generate) -> AudioJob:
        """Return a job with its clip decoded, for checks outside a loop. Raises `RequestInvalid`."""
        job = self.job(request, 0.0)
        return job.decode(lambda _size: None) if isinstance(job, PendingClip) else job

    def tokenize(self, request: Tokenize | Detokenize, is_wanted: Callable[[], bool]) -> Tokenized | None:
        """Refuse the call: an audio model has no tokens for clients. Raises `RequestInvalid`."""
        raise self._wrong_kind()

    # -- transcription -----------------------------------------------------------------------------------------------

    def _transcription(
        self, request: Generate, arrived: float, prompt: TranscribePrompt, transcriber: Transcriber
    ) -> PendingClip:
        options = _checked(prompt, transcriber)
        if not is_wav(prompt.data) and not sound_writer.has_pyav():
            message = f"Files other than WAV cannot be read here: {sound_writer.MISSING}."
            raise RequestInvalid(Code.UNSUPPORTED, message, param="file")

        def decode(reserve: Reserve) -> AudioJob:
            media = Media("audio", hashlib.blake2b(prompt.data, digest_size=32).digest(), prompt.data, param="file")
            samples = read_audio(media, transcriber.rate, prompt.most_s or float("inf"), reserve)
            seconds = len(samples) / transcriber.rate
            if seconds < _MIN_CLIP_S:
                message = f"The audio clip lasts {seconds:.3f} seconds; {_MIN_CLIP_S:g} is the least that can be heard."
                raise RequestInvalid(Code.INVALID_AUDIO, message, param="file")
            windows = transcriber.transcribe(samples, options, request.sampling, self._check)
            return AudioJob(
                **_common(request, arrived),
                work=_transcript(windows, seconds),
                input_tokens=max(1, round(seconds * TRANSCRIBED_TOKENS_PER_S)),
                heard_s=seconds,
                sample_bytes=samples.nbytes,
            )

        ends = arrived + (request.deadline_ms / 1e3 if request.deadline_ms else _DECODE_WAIT_S)
        return PendingClip(request.rid, request.priority, request.tenant, ends, decode)

    # -- speech ------------------------------------------------------------------------------------------------------

    def _spoken(self, request: Generate, arrived: float, prompt: SpeechPrompt, speaker: Speaker) -> AudioJob:
        if prompt.format not in sound_writer.formats():
            message = f"Speech as {prompt.format} cannot be written here: {sound_writer.MISSING}. wav and pcm can."
            raise RequestInvalid(Code.UNSUPPORTED, message, param="response_format")
        if prompt.speed != 1.0 and not sound_writer.has_pyav():
            message = f"Speech at another speed cannot be made here: {sound_writer.MISSING}."
            raise RequestInvalid(Code.UNSUPPORTED, message, param="speed")
        if prompt.instructions and speaker.instructions is Instructions.NONE:
            message = "This model takes no instructions on how to speak."
            raise RequestInvalid(Code.UNSUPPORTED, message, param="instructions")
        if not prompt.instructions and speaker.instructions is Instructions.NEEDED:
            message = "This model speaks in the voice that 'instructions' describe."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="instructions")
        if speaker.voices and prompt.voice not in ("", *speaker.voices):
            known = ", ".join(speaker.voices)
            message = f"The model has no voice {prompt.voice[:100]!r}; it has: {known}."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="voice")
        _check_text(speaker.marks, prompt.text, "input")
        _check_text(speaker.marks, prompt.instructions, "instructions")
        # Clients must name a voice even for a model with only one, so a model without named voices ignores the name.
        deviations = ("voice",) if prompt.voice and not speaker.voices else ()
        voice = (prompt.voice or speaker.voices[0]) if speaker.voices else ""
        return AudioJob(
            **_common(request, arrived),
            deviations=deviations,
            work=_speech(speaker, structs.replace(prompt, voice=voice), request.sampling.seed, self._check),
            input_tokens=max(1, len(prompt.text) // _CHARS_PER_TOKEN),
        )

    def _wrong_kind(self) -> RequestInvalid:
        is_transcriber = self._model.transcriber is not None
        what = "writes down what it hears" if is_transcriber else "speaks"
        where = "POST /v1/audio/transcriptions" if is_transcriber else "POST /v1/audio/speech"
        return RequestInvalid(Code.UNSUPPORTED, f"This model {what} and nothing else: use {where}.", param="model")


def _checked(prompt: TranscribePrompt, transcriber: Transcriber) -> TranscribePrompt:
    """Return the prompt without its clip, with the model's code for the language.

    Raises `RequestInvalid` for options that the model does not support.
    """
    language = ""
    if prompt.language:
        try:
            language = transcriber.language(prompt.language)
        except KeyError:
            known = ", ".join(transcriber.languages)
            message = (
                f"The model knows no language {prompt.language[:40]!r}; it knows: {known}."
                if known
                else "This model cannot be told a language: it writes down what it was trained on."
            )
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="language") from None
    if prompt.is_translated and not transcriber.translates:
        raise RequestInvalid(Code.UNSUPPORTED, "This model translates nothing.", param="model")
    if prompt.has_words and not transcriber.has_words:
        message = "This model tells no times of words."
        raise RequestInvalid(Code.UNSUPPORTED, message, param="timestamp_granularities")
    if prompt.text and not transcriber.has_text:
        raise RequestInvalid(Code.UNSUPPORTED, "This model takes no prompt.", param="prompt")
    _check_text(transcriber.marks, prompt.text, "prompt")
    return structs.replace(prompt, data=b"", language=language)


def _check_text(marks: AddedTokens, text: str, param: str) -> None:
    """Raise `RequestInvalid` for a text that contains control tokens of the model."""
    if mark := marks.first(text):
        message = f"'{param}' holds {mark!r}, which is a control token of the model and no text."
        raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)


def _common(request: Generate, arrived: float) -> dict[str, Any]:
    """Return the fields of a job that do not depend on its prompt."""
    return {
        "rid": request.rid,
        "arrived": arrived,
        "priority": request.priority,
        "tenant": request.tenant,
        "deadline": arrived + request.deadline_ms / 1e3 if request.deadline_ms else None,
        "already_sent": len(request.resume),
    }


def _transcript(windows: Iterator[AudioWindow], seconds: float) -> Generator[AudioPiece]:
    """Yield a piece for each window of a clip of `seconds` seconds."""
    for window in windows:
        part = TranscriptPart(window.segments, window.language, round(seconds, 3))
        # Text must count as a token; otherwise a successor of this worker could not know that the text was sent.
        tokens = tuple(window.tokens) or ((0,) if window.text else ())
        yield AudioPiece(window.text, tokens, from_worker.encode(part))


def _speech(speaker: Speaker, prompt: SpeechPrompt, seed: int, check: Check) -> Generator[AudioPiece]:
    """Yield a piece for each group of samples that produces bytes, and a last piece with the end of the file."""
    writer = SoundWriter(prompt.format, speaker.rate, prompt.speed)
    sent = 0

    def piece(data: bytes, *, ends_turn: bool) -> AudioPiece:
        nonlocal sent
        count = max(1, round(writer.seconds * SPOKEN_TOKENS_PER_S) - sent) if data else 0
        sent += count
        return AudioPiece("", (0,) * count, data, ends_turn)

    for samples, ends_turn in speaker.speak(prompt, seed, check):
        if not np.isfinite(samples).all():
            raise RequestInvalid(Code.ROW_FAILED, _NOT_FINITE)
        data = writer.add(samples)
        if prompt.most_s and writer.seconds > prompt.most_s:
            message = f"The speech is longer than the {prompt.most_s:g} seconds that are spoken for a request."
            raise RequestInvalid(Code.ROW_FAILED, message, param="input")
        yield piece(data, ends_turn=ends_turn)
    yield piece(writer.end(), ends_turn=False)
