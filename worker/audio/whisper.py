"""Whisper, window by window: mlx-audio's model, features and decoding, in a loop that can be ended between two tokens.

The rules by which windows move, and by which a window is decoded again, are those of OpenAI's `transcribe`
(github.com/openai/whisper, MIT), on which mlx-audio's own `generate` rests; a test compares both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_audio.stt.models.whisper.audio import (
    HOP_LENGTH,
    N_FRAMES,
    N_SAMPLES,
    SAMPLE_RATE,
    log_mel_spectrogram,
    pad_or_trim,
)
from mlx_audio.stt.models.whisper.decoding import DecodingOptions, DecodingTask, Inference
from mlx_audio.stt.models.whisper.timing import add_word_timestamps
from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE

from protocol.transcript import Segment, Word
from worker.audio.marks import AddedTokens
from worker.audio.transcriber import AudioWindow, Check, Samples, TranscribeOptions

# A window that fails is decoded again, at the next temperature.
_TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_COMPRESSION_MOST: Final = 2.4
_LOGPROB_LEAST: Final = -1.0
_NO_SPEECH_MOST: Final = 0.6
# Text of a window that needed more is not shown to the next.
_TRUSTED_TEMPERATURE: Final = 0.5
_FRAMES_A_SECOND: Final = SAMPLE_RATE // HOP_LENGTH
# Features are made of so much at once: those of an hour would take two gigabytes on the way. They overlap by what the
# first window of the next piece needs, and by a second for the edges of the transform.
_PIECE_FRAMES: Final = 600 * _FRAMES_A_SECOND
_EDGE_FRAMES: Final = _FRAMES_A_SECOND


class _CheckedInference(Inference):
    """Inference that can be ended between two tokens."""

    def __init__(self, model: Any, check: Check) -> None:
        super().__init__(model)
        self._check = check

    def logits(self, tokens: Any, audio_features: Any) -> Any:
        self._check()
        return super().logits(tokens, audio_features)


class _CheckedTask(DecodingTask):
    """Decoding of one window that can be ended between two tokens."""

    def __init__(self, model: Any, options: DecodingOptions, check: Check) -> None:
        super().__init__(model, options)
        self.inference = _CheckedInference(model, check)


class _Features:
    """Log-mel features of a clip, made piece by piece."""

    def __init__(self, samples: Samples, mels: int) -> None:
        self._samples = samples
        self._mels = mels
        self.frames = len(samples) // HOP_LENGTH
        self._piece = -1
        self._made: Any = None

    def window(self, start: int, frames: int) -> Any:
        piece = start // _PIECE_FRAMES
        first = max(0, piece * _PIECE_FRAMES - _EDGE_FRAMES)
        if piece != self._piece:
            last = (piece + 1) * _PIECE_FRAMES + N_FRAMES + _EDGE_FRAMES
            part = self._samples[first * HOP_LENGTH : last * HOP_LENGTH]
            # Silence behind the end, as Whisper was trained with.
            padding = N_SAMPLES if last >= self.frames else 0
            self._made = log_mel_spectrogram(part, n_mels=self._mels, padding=padding)
            mx.eval(self._made)
            self._piece = piece
        return self._made[start - first : start - first + frames]


@dataclass(slots=True)
class _State:
    """State of a transcript. Owned by the call that makes it."""

    seek: int = 0
    # All tokens so far, and from where on the next window is shown them.
    tokens: list[int] = field(default_factory=list[int])
    shown_from: int = 0
    last_speech: float = 0.0


class WhisperHearer:
    """One loaded Whisper, of `mlx_audio.stt.models.whisper`."""

    rate: int = SAMPLE_RATE
    has_words = True
    has_text = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self.marks = AddedTokens(model.get_tokenizer().hf_tokenizer)
        self._is_half = model.dtype == mx.float16
        self.translates = bool(model.is_multilingual)
        self.languages = tuple(list(LANGUAGES)[: model.num_languages]) if model.is_multilingual else ("en",)

    def language(self, name: str) -> str:
        code = name.lower()
        code = TO_LANGUAGE_CODE.get(code, code)
        if code not in self.languages:
            raise KeyError(name)
        return code

    def hear(self, samples: Samples, wish: TranscribeOptions, check: Check) -> Iterator[AudioWindow]:
        model = self._model
        features = _Features(samples, model.dims.n_mels)
        task = "translate" if wish.is_translated else "transcribe"
        check()
        language = wish.language or self._detected(features)
        tokenizer = model.get_tokenizer(language=language, task=task)
        state = _State(tokens=tokenizer.encode(" " + wish.text.strip()) if wish.text.strip() else [])
        given = len(state.tokens)
        while state.seek < features.frames:
            mx.random.seed((wish.seed + state.seek) % (1 << 64))
            segments = self._window(features, state, tokenizer, wish, language, task, check)
            tokens = [token for segment in segments for token in segment["tokens"]]
            text = tokenizer.decode([token for token in tokens if token < tokenizer.eot])
            is_first = len(state.tokens) == given
            state.tokens += tokens
            yield AudioWindow(
                text.lstrip() if is_first else text,
                tokens,
                tuple(_segment(each) for each in segments),
                LANGUAGES.get(language, language),
            )

    def _detected(self, features: _Features) -> str:
        if not self._model.is_multilingual:
            return "en"
        mel = pad_or_trim(features.window(0, N_FRAMES), N_FRAMES, axis=-2).astype(self._model.dtype)
        _, probabilities = self._model.detect_language(mel)
        return max(probabilities, key=probabilities.get)

    def _window(
        self,
        features: _Features,
        state: _State,
        tokenizer: Any,
        wish: TranscribeOptions,
        language: str,
        task: str,
        check: Check,
    ) -> list[dict[str, Any]]:
        """Segments of the window at `state.seek`, which moves on."""
        model, seek = self._model, state.seek
        frames = min(N_FRAMES, features.frames - seek)
        mel = pad_or_trim(features.window(seek, frames), N_FRAMES, axis=-2).astype(model.dtype)
        check()
        encoded = model.encoder(mel[None])
        options = DecodingOptions(
            task=task, language=language, prompt=state.tokens[state.shown_from :], fp16=self._is_half
        )
        result = self._decoded(encoded, options, wish.temperature, check)
        if result.no_speech_prob > _NO_SPEECH_MOST and result.avg_logprob <= _LOGPROB_LEAST:
            state.seek += frames
            return []
        segments, is_closed = self._segments(result, tokenizer, state, frames)
        if wish.has_words:
            self._time_words(segments, tokenizer, mel, frames, state, is_closed)
        for segment in segments:
            if segment["start"] == segment["end"] or not segment["text"].strip():
                segment |= {"text": "", "tokens": [], "words": []}
        if result.temperature > _TRUSTED_TEMPERATURE:
            state.shown_from = len(state.tokens) + sum(len(segment["tokens"]) for segment in segments)
        # Each window moves on, whatever times the model has made up.
        state.seek = max(state.seek, seek + 1)
        return segments

    def _decoded(self, encoded: Any, options: DecodingOptions, temperature: float, check: Check) -> Any:
        """The decoding of a window, at the first temperature at which it does not fail."""
        result: Any = None
        for each in _TEMPERATURES if temperature == 0 else (temperature,):
            task = _CheckedTask(self._model, _at(options, each), check)
            result = task.run(encoded)[0]
            is_silent = result.no_speech_prob > _NO_SPEECH_MOST
            # Where its rules leave it no token, it has no number.
            is_likely = result.avg_logprob >= _LOGPROB_LEAST
            has_failed = result.compression_ratio > _COMPRESSION_MOST or not is_likely
            if is_silent or not has_failed:
                break
        return result

    def _segments(self, result: Any, tokenizer: Any, state: _State, frames: int) -> tuple[list[dict[str, Any]], bool]:
        """Segments by the times among the tokens, and whether nothing is left of the window. Moves `state.seek`."""
        tokens = np.array(result.tokens, dtype=np.int64)
        begin = tokenizer.timestamp_begin
        stride = N_FRAMES // self._model.dims.n_audio_ctx
        step_s = stride / _FRAMES_A_SECOND
        offset = state.seek / _FRAMES_A_SECOND

        def made(start: float, end: float, part: Sequence[int]) -> dict[str, Any]:
            return {
                "seek": state.seek,
                "start": start,
                "end": end,
                "text": tokenizer.decode([token for token in part if token < tokenizer.eot]),
                "tokens": list(part),
                "result": result,
                "words": [],
            }

        is_time = tokens >= begin
        is_closed = is_time[-2:].tolist() == [False, True]
        pairs = (np.flatnonzero(is_time[:-1] & is_time[1:]) + 1).tolist()
        if pairs:
            ends = [*pairs, len(tokens)] if is_closed else pairs
            segments = [
                made(
                    offset + (int(tokens[start]) - begin) * step_s,
                    offset + (int(tokens[end - 1]) - begin) * step_s,
                    tokens[start:end].tolist(),
                )
                for start, end in zip([0, *ends], ends, strict=False)
            ]
            # Of what was not closed the next window hears again.
            state.seek += frames if is_closed else (int(tokens[ends[-1] - 1]) - begin) * stride
            return segments, is_closed
        times = tokens[is_time]
        duration = frames / _FRAMES_A_SECOND
        if len(times) and int(times[-1]) != begin:
            duration = (int(times[-1]) - begin) * step_s
        segments = [made(offset, offset + duration, tokens.tolist())]
        state.seek += frames
        return segments, is_closed

    def _time_words(
        self, segments: list[dict[str, Any]], tokenizer: Any, mel: Any, frames: int, state: _State, is_closed: bool
    ) -> None:
        """Times of words, by which also segments and `state.seek` are set."""
        if not segments:
            return
        offset = segments[0]["seek"] / _FRAMES_A_SECOND
        add_word_timestamps(
            segments=segments,
            model=self._model,
            tokenizer=tokenizer,
            mel=mel,
            num_frames=frames,
            last_speech_timestamp=state.last_speech,
        )
        words = [word for segment in segments for word in segment["words"]]
        end = words[-1]["end"] if words else segments[-1]["end"]
        if not is_closed and end > offset:
            state.seek = round(end * _FRAMES_A_SECOND)
        state.last_speech = end


def _at(options: DecodingOptions, temperature: float) -> DecodingOptions:
    return DecodingOptions(
        task=options.task,
        language=options.language,
        prompt=options.prompt,
        fp16=options.fp16,
        temperature=temperature,
    )


def _segment(raw: dict[str, Any]) -> Segment:
    result = raw["result"]
    return Segment(
        start=round(float(raw["start"]), 3),
        end=round(float(raw["end"]), 3),
        text=raw["text"],
        tokens=tuple(raw["tokens"]),
        temperature=float(result.temperature),
        avg_logprob=_finite(result.avg_logprob),
        compression_ratio=_finite(result.compression_ratio),
        no_speech_prob=_finite(result.no_speech_prob),
        seek=int(raw["seek"]),
        words=tuple(Word(each["word"], float(each["start"]), float(each["end"])) for each in raw["words"]),
    )


def _finite(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 0.0
