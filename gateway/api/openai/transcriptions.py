"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import converted
from gateway.api.common.doc_hints import known, shape, words
from gateway.api.openai.events import EventEncoder, event
from gateway.api.openai.request import Seed
from gateway.api.openai.transcript_forms import TokenUsage, Transcript
from gateway.errors import BadRequest, BodyTooLarge, Unsupported, invalid_choice, missing_parameter
from gateway.http.exchange import send_body
from gateway.http.multipart import ROOM_BYTES, MultipartForm, read_form
from gateway.http.sse import cut_off, folded
from gateway.request.record import record_of
from gateway.services import Services
from protocol.from_worker import Delta
from protocol.kinds import AUDIO
from protocol.prompts import TranscribePrompt
from protocol.to_worker import Generate, Sampling

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


class Transcriptions:
    """ASGI endpoint of transcriptions or, with `is_translated`, of translations into English."""

    def __init__(self, services: Services, *, is_translated: bool) -> None:
        self._services = services
        self._is_translated = is_translated
        self._struct = TranslationRequest if is_translated else TranscriptionRequest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        settings = services.config.audio
        content_type = Headers(scope=scope).get("content-type", "")

        def decode(body: bytes) -> tuple[tuple[TranslationRequest, bytes], list[str]]:
            form = read_form(body, content_type, FILE)
            request, unknown = _request(form, self._struct)
            return (request, _file(form, settings.max_size_bytes)), unknown

        limit = settings.max_size_bytes + ROOM_BYTES
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
                    most_s=settings.max_duration_s,
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
