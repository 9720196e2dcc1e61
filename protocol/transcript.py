"""Parts of a transcript, as a worker sends them in the `data` of a `Delta`, and how audio is counted in tokens."""

from typing import Final

import msgspec

# Tokens a second of audio, as OpenAI bills them: of what is heard, and of what is spoken.
HEARD_RATE: Final = 10
SPOKEN_RATE: Final = 20
# Bytes of samples of all clips that a worker holds where its memory allows it, and always: an hour is 230 MB.
CLIP_BYTES: Final = 512 << 20
CLIP_BYTES_LEAST: Final = 16 << 20


class Word(msgspec.Struct, frozen=True, array_like=True):
    """A word and its times in seconds from the beginning of the clip."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of speech with its times in seconds. The numbers behind `text` are Whisper's, 0 from other families."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    # The window that it was heard in, in hundredths of a second.
    seek: int = 0
    words: tuple[Word, ...] = ()


class TranscriptPart(msgspec.Struct, frozen=True, array_like=True):
    """Text of one window. `seconds` is the length of the whole clip."""

    segments: tuple[Segment, ...]
    language: str = ""
    seconds: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TranscriptPart] = msgspec.msgpack.Decoder(TranscriptPart)


def encode(part: TranscriptPart) -> bytes:
    """The `data` of a delta."""
    return _encoder.encode(part)


def decode(data: bytes) -> TranscriptPart:
    """The part in the `data` of a delta. Raises `msgspec.DecodeError`."""
    return _decoder.decode(data)
