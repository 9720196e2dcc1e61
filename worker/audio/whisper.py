"""Whisper transcriber: mlx-audio's model, features and decoding, in a loop that can be aborted between two tokens.

The rules for moving windows and for decoding a window again are those of OpenAI's `transcribe`
(github.com/openai/whisper, MIT), on which mlx-audio's own `generate` is based; a test compares both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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

from protocol.from_worker import Segment, Word
from protocol.to_worker import Sampling, TranscribePrompt
from worker.audio.transcriber import AddedTokens, AudioWindow, Check, Samples

# Temperatures at which a window is decoded, one after another, until decoding succeeds.
_TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_COMPRESSION_RATIO: Final = 2.4
_MIN_AVG_LOGPROB: Final = -1.0
_MAX_NO_SPEECH_PROB: Final = 0.6
# A window's text is part of the next window's prompt only if it was decoded at this temperature or a lower one.
_MAX_PROMPT_TEMPERATURE: Final = 0.5
_FRAMES_PER_SECOND: Final = SAMPLE_RATE // HOP_LENGTH
# Length of the pieces in which features are computed, 10 minutes: computing an hour at once would take two gigabytes.
# Pieces overlap by the first window of the next piece, and by a second for the edges of the transform.
_PIECE_FRAMES: Final = 600 * _FRAMES_PER_SECOND
_EDGE_FRAMES: Final = _FRAMES_PER_SECOND


class _CheckedInference(Inference):
    """Inference that can be aborted between two tokens."""

    def __init__(self, model: Any, check: Check) -> None:
        super().__init__(model)
        self._check = check

    def logits(self, tokens: Any, audio_features: Any) -> Any:
        self._check()
        return super().logits(tokens, audio_features)


class _Features:
    """Log-mel features of a clip, computed piece by piece."""

    def __init__(self, samples: Samples, mels: int) -> None:
        self._samples = samples
        self._mels = mels
        self.frames = len(samples) // HOP_LENGTH
        self._piece = -1
        self._piece_features: Any = None

    def window(self, start: int, frames: int) -> Any:
        piece = start // _PIECE_FRAMES
        first = max(0, piece * _PIECE_FRAMES - _EDGE_FRAMES)
        if piece != self._piece:
            last = (piece + 1) * _PIECE_FRAMES + N_FRAMES + _EDGE_FRAMES
            part = self._samples[first * HOP_LENGTH : last * HOP_LENGTH]
            # Whisper was trained with silence after the end of a clip.
            padding = N_SAMPLES if last >= self.frames else 0
            self._piece_features = log_mel_spectrogram(part, n_mels=self._mels, padding=padding)
            mx.eval(self._piece_features)
            self._piece = piece
        return self._piece_features[start - first : start - first + frames]


@dataclass(slots=True)
class _TranscriptState:
    """State of one transcript, owned by the generator that yields it."""

    seek: int = 0
    # All tokens so far.
    tokens: list[int] = field(default_factory=list[int])
    # Index of the first token that the next window's prompt includes.
    prompt_from: int = 0
    last_speech: float = 0.0


class WhisperTranscriber:
    """Loaded Whisper model of `mlx_audio.stt.models.whisper`."""

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

    def transcribe(
        self, samples: Samples, prompt: TranscribePrompt, sampling: Sampling, check: Check
    ) -> Iterator[AudioWindow]:
        model = self._model
        features = _Features(samples, model.dims.n_mels)
        task = "translate" if prompt.is_translated else "transcribe"
        check()
        language = prompt.language or self._detected(features)
        tokenizer = model.get_tokenizer(language=language, task=task)
        state = _TranscriptState(tokens=tokenizer.encode(" " + prompt.text.strip()) if prompt.text.strip() else [])
        given = len(state.tokens)
        while state.seek < features.frames:
            mx.random.seed((sampling.seed + state.seek) % (1 << 64))
            options = DecodingOptions(
                task=task, language=language, prompt=state.tokens[state.prompt_from :], fp16=self._is_half
            )
            temperatures = (sampling.temperature,) if sampling.temperature else _TEMPERATURES
            segments = self._window(features, state, tokenizer, options, temperatures, prompt.has_words, check)
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
        state: _TranscriptState,
        tokenizer: Any,
        options: DecodingOptions,
        temperatures: Sequence[float],
        has_words: bool,
        check: Check,
    ) -> list[dict[str, Any]]:
        """Return the segments of the window at `state.seek`, and advance `state.seek`."""
        model, seek = self._model, state.seek
        frames = min(N_FRAMES, features.frames - seek)
        mel = pad_or_trim(features.window(seek, frames), N_FRAMES, axis=-2).astype(model.dtype)
        check()
        encoded = model.encoder(mel[None])
        result = self._decoded(encoded, options, temperatures, check)
        if result.no_speech_prob > _MAX_NO_SPEECH_PROB and result.avg_logprob <= _MIN_AVG_LOGPROB:
            state.seek += frames
            return []
        segments, is_closed = self._segments(result, tokenizer, state, frames)
        if has_words:
            self._time_words(segments, tokenizer, mel, frames, state, is_closed)
        for segment in segments:
            if segment["start"] == segment["end"] or not segment["text"].strip():
                segment |= {"text": "", "tokens": [], "words": []}
        if result.temperature > _MAX_PROMPT_TEMPERATURE:
            state.prompt_from = len(state.tokens) + sum(len(segment["tokens"]) for segment in segments)
        # The position must advance even if the model generates wrong times.
        state.seek = max(state.seek, seek + 1)
        return segments

    def _decoded(self, encoded: Any, options: DecodingOptions, temperatures: Sequence[float], check: Check) -> Any:
        """Decode a window at the first temperature at which decoding does not fail."""
        result: Any = None
        for temperature in temperatures:
            task = DecodingTask(self._model, replace(options, temperature=temperature))
            task.inference = _CheckedInference(self._model, check)
            result = task.run(encoded)[0]
            is_silent = result.no_speech_prob > _MAX_NO_SPEECH_PROB
            # The log-probability is NaN if the decoding rules allowed no token.
            is_likely = result.avg_logprob >= _MIN_AVG_LOGPROB
            has_failed = result.compression_ratio > _MAX_COMPRESSION_RATIO or not is_likely
            if is_silent or not has_failed:
                break
        return result

    def _segments(
        self, result: Any, tokenizer: Any, state: _TranscriptState, frames: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """Split the tokens into segments by their timestamps, and advance `state.seek`.

        Also returns whether the whole window was used.
        """
        tokens = np.array(result.tokens, dtype=np.int64)
        begin = tokenizer.timestamp_begin
        stride = N_FRAMES // self._model.dims.n_audio_ctx
        step_s = stride / _FRAMES_PER_SECOND
        offset = state.seek / _FRAMES_PER_SECOND

        def segment(start: float, end: float, part: Sequence[int]) -> dict[str, Any]:
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
                segment(
                    offset + (int(tokens[start]) - begin) * step_s,
                    offset + (int(tokens[end - 1]) - begin) * step_s,
                    tokens[start:end].tolist(),
                )
                for start, end in zip([0, *ends], ends, strict=False)
            ]
            # The end of the window without a closing timestamp is transcribed again in the next window.
            state.seek += frames if is_closed else (int(tokens[ends[-1] - 1]) - begin) * stride
            return segments, is_closed
        times = tokens[is_time]
        duration = frames / _FRAMES_PER_SECOND
        if len(times) and int(times[-1]) != begin:
            duration = (int(times[-1]) - begin) * step_s
        segments = [segment(offset, offset + duration, tokens.tolist())]
        state.seek += frames
        return segments, is_closed

    def _time_words(
        self,
        segments: list[dict[str, Any]],
        tokenizer: Any,
        mel: Any,
        frames: int,
        state: _TranscriptState,
        is_closed: bool,
    ) -> None:
        """Add word timestamps, and adjust the segments and `state.seek` to these timestamps."""
        if not segments:
            return
        offset = segments[0]["seek"] / _FRAMES_PER_SECOND
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
            state.seek = round(end * _FRAMES_PER_SECOND)
        state.last_speech = end


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
