"""Audio: `POST /v1/audio/transcriptions`, `/v1/audio/translations` and `/v1/audio/speech`.

Transcripts in the formats of OpenAI's API: JSON, plain text, and subtitles as SRT and WebVTT.
"""

import base64
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field, structs
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema, converted
from gateway.api.common.request_fields import TEXT, known, shape, words
from gateway.api.openai.request import Seed
from gateway.api.openai.response import EventEncoder, event
from gateway.errors import ApiError, BadRequest, BodyTooLarge, Unsupported, invalid_choice, missing_parameter
from gateway.http.bodies import ROOM_BYTES, MultipartForm, read_form, send_body
from gateway.http.direct_write import writer_of
from gateway.http.sse import StreamTiming, cut_off, folded
from gateway.request.record import record_of
from gateway.services import Services
from protocol import from_worker
from protocol.checkpoint import AUDIO
from protocol.from_worker import Delta, Usage
from protocol.to_worker import Generate, Sampling, SpeechPrompt, TranscribePrompt


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
        self.segments: list[from_worker.Segment] = []
        self.usage: Usage | None = None

    def add(self, deltas: Sequence[Delta]) -> str:
        """Add deltas to the transcript and return their text."""
        new = ""
        for delta in deltas:
            new += delta.text
            if delta.data:
                part = from_worker.decode(delta.data)
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


JSON, PLAIN, SRT, VERBOSE, VTT = "json", "text", "srt", "verbose_json", "vtt"
FORMATS: Final = (JSON, PLAIN, SRT, VERBOSE, VTT)
# Maps each response format to its content type.
_TYPES: Final = {
    JSON: b"application/json",
    VERBOSE: b"application/json",
    PLAIN: b"text/plain; charset=utf-8",
    SRT: b"text/plain; charset=utf-8",
    VTT: b"text/vtt; charset=utf-8",
}
FILE: Final = "file"
GRANULARITIES: Final = ("segment", "word")
# Fields whose value is a list. A form sends a list as several fields of the same name.
_LISTS: Final = {
    "timestamp_granularities": "timestamp_granularities[]",
    "timestamp_granularities[]": "timestamp_granularities[]",
    "include": "include[]",
    "include[]": "include[]",
}
NO_ACTION: Final = frozenset({"user"})
_PROMPT_CHARS_MAX: Final = 8192
Language = Annotated[str, Meta(max_length=64)]
PromptText = Annotated[str, Meta(max_length=_PROMPT_CHARS_MAX)]
Binary = Annotated[str, shape({"contentMediaType": "application/octet-stream"})]


class TranslationRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/audio/translations`, as a form."""

    # This field is for the API document; the file's bytes are passed separately.
    file: Binary = ""
    model: str = ""
    prompt: PromptText = ""
    response_format: Annotated[str, words(*FORMATS)] = JSON
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0


class TranscriptionRequest(TranslationRequest, frozen=True, kw_only=True):
    """`POST /v1/audio/transcriptions`, as a form. `language` is an ISO 639-1 code; without it the model detects it."""

    language: Language = ""
    timestamp_granularities: Annotated[list[str], shape({"items": {"enum": list(GRANULARITIES)}})] = field(
        default_factory=list[str], name="timestamp_granularities[]"
    )
    stream: bool = False
    include: list[str] = field(default_factory=list[str], name="include[]")
    # The value changes nothing: all clips are transcribed in windows that end at pauses, as OpenAI does for `auto`.
    chunking_strategy: Annotated[str, known("auto")] = "auto"


class TranscriptDelta(Struct, frozen=True, tag_field="type", tag="transcript.text.delta"):
    delta: str


class TranscriptDone(Struct, frozen=True, tag_field="type", tag="transcript.text.done"):
    text: str
    usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET


# Maximum duration of a file to transcribe. An hour takes 230 MB of the worker's memory.
DURATION_MAX_S: Final = 7200.0


class Transcriptions:
    """ASGI endpoint of transcriptions or, with `is_translated`, of translations into English."""

    def __init__(self, services: Services, *, is_translated: bool) -> None:
        self._services = services
        self._is_translated = is_translated
        self._struct = TranslationRequest if is_translated else TranscriptionRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        max_bytes = services.config.media.max_size_bytes
        content_type = Headers(scope=scope).get("content-type", "")

        def decode(body: bytes) -> tuple[tuple[TranslationRequest, bytes], list[str]]:
            form = read_form(body, content_type, FILE)
            request, unknown = _request(form, self._struct)
            return (request, _file(form, max_bytes)), unknown

        limit = max_bytes + ROOM_BYTES
        (request, data), unknown = await serve.read(services, record, scope, receive, decode, limit)
        is_stream = isinstance(request, TranscriptionRequest) and request.stream
        granularities = _checked(request, is_stream=is_stream)
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown)
        assert record.media_lease is not None, "the middleware makes one for each request"
        record.media_lease.owner = record.caller.key or ""
        record.media_lease.grow(len(data))
        record.media_bytes = len(data)
        job = await serve.prepare(
            services,
            record,
            model,
            lambda next_rid, ms: Generate(
                next_rid(),
                TranscribePrompt(
                    data,
                    language=request.language if isinstance(request, TranscriptionRequest) else "",
                    text=request.prompt,
                    is_translated=self._is_translated,
                    has_words="word" in granularities,
                    most_s=DURATION_MAX_S,
                ),
                Sampling(temperature=request.temperature, seed=seed),
                deadline_ms=ms,
                priority=request.priority,
            ),
            AUDIO,
        )
        if is_stream:
            await job.stream(TranscriptEncoder(), receive, send)
            return
        task = "translate" if self._is_translated else "transcribe"
        fold = TranscriptFold(request.response_format, task, granularities)
        async with cut_off(record, receive):
            with job.generation(fold.bind) as generation:
                body = await folded(generation, fold)
                await send_body(send, 200, body, generation.headers, _TYPES[request.response_format])


def _request(form: MultipartForm, struct: type[TranslationRequest]) -> tuple[TranslationRequest, list[str]]:
    """Convert the fields of a form. Returns the request and the names of unknown fields. Raises `BadRequest`."""
    names = {each.encode_name for each in msgspec.structs.fields(struct)}
    values: dict[str, Any] = {}
    lists: defaultdict[str, list[str]] = defaultdict(list)
    unknown: list[str] = []
    for name, value in form.fields:
        listed = _LISTS.get(name, name)
        if listed not in names:
            if name not in NO_ACTION:
                unknown.append(name)
        elif listed in _LISTS:
            lists[listed].append(value)
        elif value:
            # Forms send an empty value for an unset field.
            values[name] = value
    return converted(values | lists, struct, "", strict=False), unknown


def _file(form: MultipartForm, limit_bytes: int) -> bytes:
    """Return the bytes of the form's file. Raises `ApiError`."""
    if form.file is None:
        raise missing_parameter(FILE)
    if not form.file:
        raise BadRequest("'file' is empty.", FILE, "invalid_value")
    if len(form.file) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    return form.file


def _checked(request: TranslationRequest, *, is_stream: bool) -> Sequence[str]:
    """Return the requested granularities of timestamps. Raises `BadRequest` if fields exclude each other."""
    format = request.response_format
    if format not in FORMATS:
        raise invalid_choice(format, FORMATS, "response_format")
    if is_stream and format != JSON:
        raise BadRequest("A stream has the 'response_format' json.", "response_format", "invalid_value")
    if not isinstance(request, TranscriptionRequest):
        return ("segment",)
    if request.include:
        raise Unsupported(f"'include' of {request.include[0][:40]!r} is not supported.", "include")
    if request.chunking_strategy != "auto":
        raise Unsupported("'chunking_strategy' is auto.", "chunking_strategy")
    granularities = request.timestamp_granularities
    for each in granularities:
        if each not in GRANULARITIES:
            raise invalid_choice(each, GRANULARITIES, "timestamp_granularities")
    if granularities and format != VERBOSE:
        message = "'timestamp_granularities' needs the 'response_format' verbose_json."
        raise BadRequest(message, "timestamp_granularities", "invalid_value")
    return granularities or ("segment",)


class TranscriptFold:
    """`Fold` of a whole transcript, in one of the formats."""

    def __init__(self, format: str, task: str, granularities: Sequence[str]) -> None:
        self._format = format
        self._task = task
        self._granularities = granularities
        self._transcript = Transcript()

    def bind(self, rids: Sequence[int]) -> None:
        """Ignore the request id, because a request has only one."""

    def add(self, deltas: Sequence[Delta]) -> None:
        self._transcript.add(deltas)

    def result(self) -> bytes:
        whole = self._transcript
        if self._task == "translate":
            # A translation is in English, whatever language was spoken.
            whole.language = "english"
        match self._format:
            case "text":
                return whole.plain()
            case "srt":
                return whole.srt()
            case "vtt":
                return whole.vtt()
            case "verbose_json":
                return whole.verbose(self._task, self._granularities)
            case _:
                return whole.json()


class TranscriptEncoder(EventEncoder):
    """Encoder of a transcript stream: first the text of each window, then the whole text."""

    def __init__(self) -> None:
        self._transcript = Transcript()

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        new = self._transcript.add(deltas)
        return event(TranscriptDelta(new)) if new else b""

    def end(self) -> bytes:
        return event(TranscriptDone(self._transcript.text.strip(), self._transcript.tokens()))


# Maps each audio format to its content type.
SPEECH_FORMATS: Final = {
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
    response_format: Annotated[str, words(*SPEECH_FORMATS)] | None = None
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
        format = _checked_speech(request, INPUT_CHARS_MAX)
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
        error = await job.stream(SpeechFile(), receive, send, SPEECH_FORMATS[format], _PACE)
        if error is not None and (writer := writer_of(scope)) is not None:
            writer.cut_off()


def _checked_speech(request: SpeechRequest, max_chars: int) -> str:
    """Return the format of the file. Raises `BadRequest`."""
    if not request.input.strip():
        raise BadRequest("'input' is empty.", "input", "invalid_value")
    if len(request.input) > max_chars:
        message = f"'input' has {len(request.input)} characters; {max_chars} are taken."
        raise BadRequest(message, "input", "invalid_value")
    format = request.response_format or "mp3"
    if format not in SPEECH_FORMATS:
        raise invalid_choice(format, SPEECH_FORMATS, "response_format")
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
