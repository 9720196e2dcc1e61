"""Transcripts in the formats of OpenAI's API: JSON, plain text, and subtitles as SRT and WebVTT."""

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from protocol import transcript
from protocol.from_worker import Delta, Usage


class AudioTokens(Struct, frozen=True):
    """Details of the tokens of a transcription's input."""

    audio_tokens: int
    text_tokens: int = 0


class TokenUsage(Struct, frozen=True, tag_field="type", tag="tokens"):
    """Tokens of a clip, counted as ten per second, and of its transcript."""

    input_tokens: int
    input_token_details: AudioTokens
    output_tokens: int
    total_tokens: int


class DurationUsage(Struct, frozen=True, tag_field="type", tag="duration"):
    """Seconds of a clip, rounded up."""

    seconds: int


class TranscriptSegment(Struct, frozen=True):
    """A segment. `tokens` and the numbers after it are known only for Whisper."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(Struct, frozen=True):
    word: str
    start: float
    end: float


class Transcription(Struct, frozen=True):
    """Transcription with text and usage for the format `json`, and with all fields for `verbose_json`.

    `language` is empty if the model does not report a language.
    """

    text: str
    task: str | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptSegment] | UnsetType = UNSET
    words: list[TranscriptWord] | UnsetType = UNSET
    usage: TokenUsage | DurationUsage | UnsetType = UNSET


class Transcript:
    """Transcript so far. The deltas of one request extend it."""

    def __init__(self) -> None:
        self.text = ""
        self.language = ""
        self.seconds = 0.0
        self.segments: list[transcript.Segment] = []
        self.usage: Usage | None = None

    def add(self, deltas: Sequence[Delta]) -> str:
        """Add deltas to the transcript and return their text."""
        new = ""
        for delta in deltas:
            new += delta.text
            if delta.data:
                part = transcript.decode(delta.data)
                self.language = self.language or part.language
                self.seconds = part.seconds
                self.segments += [segment for segment in part.segments if segment.text.strip()]
            if delta.usage is not None:
                self.usage = delta.usage
        self.text += new
        return new

    def tokens(self) -> TokenUsage | UnsetType:
        """Return the usage in tokens."""
        usage = self.usage
        if usage is None:
            return UNSET
        details = AudioTokens(usage.audio_tokens, usage.prompt - usage.audio_tokens)
        return TokenUsage(usage.prompt, details, usage.completion, usage.prompt + usage.completion)

    def json(self) -> bytes:
        return msgspec.json.encode(Transcription(self.text.strip(), usage=self.tokens()))

    def plain(self) -> bytes:
        return self.text.strip().encode() + b"\n"

    def verbose(self, task: str, granularities: Sequence[str]) -> bytes:
        """Encode the transcript as JSON with segments, words or both."""
        segments = [
            msgspec.convert({"id": at} | structs.asdict(each), TranscriptSegment)
            for at, each in enumerate(self.segments)
        ]
        words = [TranscriptWord(each.word.strip(), each.start, each.end) for one in self.segments for each in one.words]
        return msgspec.json.encode(
            Transcription(
                self.text.strip(),
                task,
                self.language,
                self.seconds,
                segments if "segment" in granularities else UNSET,
                words if "word" in granularities else UNSET,
                DurationUsage(math.ceil(self.seconds)),
            )
        )

    def srt(self) -> bytes:
        """Encode the transcript as SubRip."""
        blocks = [
            f"{at}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each.text, '->')}\n"
            for at, each in enumerate(self.segments, start=1)
        ]
        return "\n".join(blocks).encode() + b"\n"

    def vtt(self) -> bytes:
        """Encode the transcript as WebVTT (https://www.w3.org/TR/webvtt1), with its three special
        characters escaped.
        """
        blocks = [
            f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_line(_escaped(each.text), '')}\n"
            for each in self.segments
        ]
        return ("WEBVTT\n\n" + "\n".join(blocks)).encode() + b"\n"


def _time(seconds: float, mark: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def _line(text: str, arrow: str) -> str:
    """Join the lines of a text: an empty line would end the subtitle, and an arrow would be read as a time."""
    line = " ".join(text.split())
    return line.replace("-->", arrow) if arrow else line


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
