"""`POST /v1/audio/speech`."""

import base64
from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import TEXT, shape, words
from gateway.api.openai.events import EventEncoder, event
from gateway.api.openai.request import Seed
from gateway.errors import ApiError, BadRequest, invalid_choice
from gateway.http.direct_write import writer_of
from gateway.http.sse import StreamTiming
from gateway.request.record import record_of
from gateway.services import Services
from protocol.from_worker import Delta, Usage
from protocol.kinds import AUDIO
from protocol.prompts import SpeechPrompt
from protocol.to_worker import Generate, Sampling

# Maps each audio format to its content type.
FORMATS: Final = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "aac": b"audio/aac",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}
INPUT_CHARS_MAX: Final = 4096
# Maximum duration of the speech of one request.
SPEECH_MAX_S: Final = 900.0
STREAMS: Final = ("audio", "sse")
# An audio file cannot contain an error. The status is therefore sent only with the file's first bytes, so that a
# refusal can have an error status.
_PACE: Final = StreamTiming(hold_s=7 * 86400.0)
Voice = Annotated[str, Meta(max_length=256)]


class VoiceId(Struct, frozen=True):
    id: Voice


class SpeechRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/audio/speech`. `voice` is one of the model's voices; empty means the model's default."""

    model: str = ""
    input: Annotated[str, shape(TEXT)]
    voice: Voice | VoiceId = ""
    instructions: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: Annotated[str, words(*FORMATS)] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Annotated[str, words(*STREAMS)] | None = None
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None


class SpeechUsage(Struct, frozen=True):
    """Tokens of the text, and of its speech at twenty per second."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class AudioDelta(Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    """The next part of the audio file, in base64."""

    audio: str


class AudioDone(Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage


_schema = Schema(SpeechRequest, frozenset({"user"}))


class SpeechEndpoint:
    """ASGI endpoint of speech. The answer is a file or a stream of events."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, _schema.decode)
        format = _checked(request, INPUT_CHARS_MAX)
        model, seed = serve.begin(services, record, request.model, True, request.seed, unknown)
        job = await serve.prepare(
            services,
            record,
            model,
            lambda next_rid, ms: Generate(
                next_rid(),
                SpeechPrompt(
                    request.input,
                    voice=request.voice if isinstance(request.voice, str) else request.voice.id,
                    speed=1.0 if request.speed is None else request.speed,
                    format=format,
                    instructions=request.instructions or "",
                    most_s=SPEECH_MAX_S,
                ),
                Sampling(seed=seed),
                deadline_ms=ms,
                priority=request.priority or 0,
            ),
            AUDIO,
        )
        if request.stream_format == "sse":
            await job.stream(SpeechEvents(), receive, send)
            return
        error = await job.stream(SpeechFile(), receive, send, FORMATS[format], _PACE)
        if error is not None and (writer := writer_of(scope)) is not None:
            writer.cut_off()


def _checked(request: SpeechRequest, max_chars: int) -> str:
    """Return the format of the file. Raises `BadRequest`."""
    if not request.input.strip():
        raise BadRequest("'input' is empty.", "input", "invalid_value")
    if len(request.input) > max_chars:
        message = f"'input' has {len(request.input)} characters; {max_chars} are taken."
        raise BadRequest(message, "input", "invalid_value")
    format = request.response_format or "mp3"
    if format not in FORMATS:
        raise invalid_choice(format, FORMATS, "response_format")
    if request.stream_format not in (None, *STREAMS):
        raise invalid_choice(request.stream_format, STREAMS, "stream_format")
    return format


class SpeechFile(EventEncoder):
    """Encoder of an audio file's bytes. If generation fails, the file is cut off, so that the client notices it."""

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(delta.data for delta in deltas)

    def keepalive(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> None:
        return None

    def end(self) -> bytes:
        return b""


class SpeechEvents(EventEncoder):
    """Encoder of an audio file as a stream of server-sent events."""

    def __init__(self) -> None:
        self._usage: Usage | None = None

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        self._usage = next((delta.usage for delta in deltas if delta.usage is not None), self._usage)
        data = b"".join(delta.data for delta in deltas)
        return event(AudioDelta(base64.b64encode(data).decode("ascii"))) if data else b""

    def end(self) -> bytes:
        usage = self._usage or Usage(0, 0, 0)
        spoken = SpeechUsage(usage.prompt, usage.completion, usage.prompt + usage.completion)
        return event(AudioDone(spoken))
