"""Parts of a transcript, which a worker sends in the `data` of a `Delta`, and how audio is counted in tokens."""

from typing import Final

import msgspec

# Tokens per second of transcribed audio, as OpenAI bills them.
TRANSCRIBED_TOKENS_PER_S: Final = 10
# Tokens per second of spoken audio, as OpenAI bills them.
SPOKEN_TOKENS_PER_S: Final = 20
# Upper bound of the memory for the decoded samples of all clips, which is a part of the worker's memory. One hour takes
# 230 MB.
MAX_CLIP_BYTES: Final = 512 << 20
# Lower bound of the memory for the decoded samples of all clips.
MIN_CLIP_BYTES: Final = 16 << 20


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Word and its times in seconds from the beginning of the clip."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Section of speech with its times in seconds. Only Whisper sets the fields after `text`."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    # Start of the segment's window, in hundredths of a second.
    seek: int = 0
    words: tuple[Word, ...] = ()


class TranscriptPart(msgspec.Struct, frozen=True, array_like=True):
    """Text of one window of a clip. `seconds` is the length of the whole clip."""

    segments: tuple[Segment, ...]
    language: str = ""
    seconds: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TranscriptPart] = msgspec.msgpack.Decoder(TranscriptPart)


def encode(part: TranscriptPart) -> bytes:
    """Encode a part to the `data` of a delta."""
    return _encoder.encode(part)


def decode(data: bytes) -> TranscriptPart:
    """Decode the part in the `data` of a delta. Raises `msgspec.DecodeError`."""
    return _decoder.decode(data)
