"""Steps of every generating endpoint: read, lower, admit, generate or count tokens, and answer.

Vectors or scores of a request. A generation computes them, and they are sent as one answer.
"""

import asyncio
import base64
import secrets
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.config.settings import ModelConfig
from gateway.errors import BUSY_RETRY_AFTER_S, ApiError, Unavailable, from_failure, from_unsendable
from gateway.http.bodies import read_body, send_body
from gateway.http.sse import (
    DEFAULT_PACE,
    EVENTS,
    EncodeProgress,
    Fold,
    SliceEvents,
    SplitAnswer,
    StreamEncoder,
    StreamTiming,
    cut_off,
    folded,
    respond_stream,
    respond_whole,
)
from gateway.link.link import CallRefused
from gateway.link.transport import WorkerGone
from gateway.media.documents import DocumentReader, has_documents, past_documents, text_chars
from gateway.media.documents import with_pages as pages_of
from gateway.media.media_reference import DOCUMENT, IMAGE, Reference
from gateway.media.modalities import check, likely_tokens, modalities
from gateway.media.read_media import MediaReader, Stored, is_inline, resolve
from gateway.request.body_memory import LARGE_BYTES
from gateway.request.generation import Generation
from gateway.request.next_turns import has_next_turn
from gateway.request.record import Header, RequestRecord, ignored_header, with_ignored
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.checkpoint import TEXT
from protocol.codec import BYTES_PER_TOKEN, Unsendable, pack
from protocol.from_worker import Delta, Tokenized
from protocol.to_worker import ChatPrompt, Detokenize, Generate, Media, Prompt, Tokenize

T = TypeVar("T")


async def read(
    services: Services,
    record: RequestRecord,
    scope: Scope,
    receive: Receive,
    decode: Callable[[bytes], tuple[T, list[str]]],
    limit_bytes: int | None = None,
) -> tuple[T, list[str]]:
    """Read and decode the body, of at most `max_body` or `limit_bytes`. Returns the request and the names of unknown
    fields.

    Raises `ApiError`.
    """
    body = await read_body(scope, receive, limit_bytes or services.config.server.max_body_bytes)
    return await services.bodies.work(record.body_bytes, decode, body)


async def with_media(services: Services, record: RequestRecord, model: ModelConfig, prompt: ChatPrompt) -> ChatPrompt:
    """Return the prompt with the bytes of its media, and with the pages of its documents. Raises `ApiError`."""
    return await with_pages(services, record, model, await read_media(services, record, model, prompt))


async def read_media(
    services: Services, record: RequestRecord, model: ModelConfig, prompt: ChatPrompt, stored: Stored | None = None
) -> ChatPrompt:
    """Return the prompt with the bytes of its media and documents. `stored` loads the media of stored responses.

    Raises `ApiError`.
    """
    references = [each for each in prompt.media if isinstance(each, Reference)]
    if not references:
        return prompt
    seen = [each for each in references if each.kind != DOCUMENT]
    check(model.name, model.path, services.view(model).ready, seen)
    assert record.media_lease is not None, "the middleware makes one for each request"
    record.media_lease.owner = record.caller.key or ""
    size = record.encoded_bytes = sum(len(each.encoded) + len(each.url) for each in references)

    # A URL may refer to many bytes, so it is always handled like a large body.
    cost = size if all(map(is_inline, references)) else LARGE_BYTES + 1

    def offload(action: Callable[[], Media]) -> Awaitable[Media]:
        return services.bodies.work(cost, action)

    reading = MediaReader(services.config.media, record.media_lease, services.fetch, offload, stored)
    return _recorded(record, await resolve(prompt, reading, past_documents(prompt)))


async def with_pages(services: Services, record: RequestRecord, model: ModelConfig, prompt: ChatPrompt) -> ChatPrompt:
    """Return the prompt with its documents replaced by the texts and pictures of their pages. Raises `ApiError`.

    Those of earlier turns that are not shown are named in the answer's headers.
    """
    if not has_documents(prompt):
        return prompt
    assert record.media_lease is not None, "the middleware makes one for each request"
    has_vision = IMAGE in modalities(model.path, services.view(model).ready)
    media, work = services.config.media, services.bodies.work
    reading = DocumentReader(media, record.media_lease, services.pdfs, model.name, has_vision, work)
    read, not_shown = await pages_of(prompt, reading)
    record.headers = with_ignored(record.headers, not_shown)
    # The texts of documents count like those of the body.
    record.encoded_bytes -= text_chars(read) - text_chars(prompt)
    return _recorded(record, read)


def _recorded(record: RequestRecord, prompt: ChatPrompt) -> ChatPrompt:
    """Return a prompt whose media the request's record lists."""
    record.media = tuple(msgspec.structs.replace(each, data=b"") for each in prompt.media)
    record.media_bytes = sum(len(each.data) for each in prompt.media)
    return prompt


def begin(
    services: Services,
    record: RequestRecord,
    name: str,
    is_stream: bool,
    asked_seed: int | None,
    unknown: list[str],
    sequences: int = 1,
) -> tuple[ModelConfig, int]:
    """Resolve the model of a request, choose its seed, and store both in the record. A negative seed is a random one.

    Raises `ModelNotFound`, and `BadRequest` if the request has more sequences than can ever run.
    """
    model = begin_reading(services, record, name, unknown, sequences)
    # The seed is always reported, so that any answer can be reproduced.
    seed = secrets.randbits(63) if asked_seed is None or asked_seed < 0 else asked_seed
    record.stream = is_stream
    record.headers = [(b"x-mlxd-seed", str(seed).encode()), *record.headers]
    return model, seed


def begin_reading(
    services: Services, record: RequestRecord, name: str, unknown: list[str], sequences: int = 1
) -> ModelConfig:
    """Resolve the model of a request without a seed, and store it in the record. Raises the same errors as `begin`."""
    model = services.live.router.resolve(name, record.caller)
    record.model = model.name
    record.headers = ignored_header(unknown)
    if unknown:
        services.metrics.model(model.name).ignored_fields += len(unknown)
    caller = record.caller
    services.admission.check(model, sequences, caller.queue_quota_percent)
    if caller.meter is not None:
        caller.meter.check(sequences)
    return model


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Request that is ready to run on a model of `kind`.

    The answer contains the log-probabilities of each prompt `repeats` times.
    """

    services: Services
    record: RequestRecord
    model: ModelConfig
    generates: list[Generate]
    kind: str = TEXT
    repeats: int = 1

    async def stream(
        self,
        encoder: StreamEncoder,
        receive: Receive,
        send: Send,
        kind: bytes = EVENTS,
        pace: StreamTiming = DEFAULT_PACE,
        on_progress: EncodeProgress | None = None,
        slice_events: SliceEvents | None = None,
    ) -> ApiError | None:
        """Generate, and answer with a stream of the content type `kind`. `on_progress` encodes progress of the prefill,
        and `slice_events` slices large events.

        Raises an `ApiError` before the status is sent; returns a later error.
        """
        with self.generation(encoder.bind) as generation:
            return await respond_stream(
                generation,
                encoder,
                receive,
                send,
                pace,
                kind,
                on_progress,
                slice_events,
            )

    async def whole(self, fold: Fold, receive: Receive, send: Send, split_answer: SplitAnswer | None = None) -> None:
        """Generate, and answer with one whole body, of which `split_answer` returns the parts. Raises `ApiError`."""
        with self.generation(fold.bind) as generation:
            await respond_whole(generation, fold, receive, send, split_answer)

    def generation(self, bind: Callable[[Sequence[int]], None]) -> Generation:
        """Return the generation of the request. Entering it takes the leases."""
        return Generation(
            self.services,
            self.model,
            self.generates,
            self.record,
            bind,
            kind=self.kind,
            repeats=self.repeats,
        )


async def prepare(
    services: Services,
    record: RequestRecord,
    model: ModelConfig,
    make: Callable[[Callable[[], int], int], Generate | list[Generate]],
    kind: str = TEXT,
    repeats: int = 1,
) -> PreparedRequest:
    """Lower a decoded request with `make`, which is called with a source of request ids and with the deadline in
    milliseconds.

    Raises `ApiError`.
    """
    work, deadline_ms = services.bodies.work, int(services.config.server.request_timeout_s * 1000)
    lowered = await work(record.body_bytes, make, services.link.next_rid, deadline_ms)
    generates = lowered if isinstance(lowered, list) else [lowered]
    record.has_next_turn = has_next_turn(generates)
    # Media can only be in the prompt of a chat, and all choices of a chat share one prompt.
    prompt = generates[0].prompt
    if isinstance(prompt, ChatPrompt) and prompt.media:
        prompt = await with_media(services, record, model, prompt)
        generates = [msgspec.structs.replace(each, prompt=prompt) for each in generates]
    try:
        generates = await work(record.body_bytes + record.media_bytes, pack, generates)
    except Unsendable as error:
        raise from_unsendable(error) from None
    return PreparedRequest(services, record, model, generates, kind, repeats)


async def tokenize(
    services: Services,
    record: RequestRecord,
    model: ModelConfig,
    prompt: Prompt,
    *,
    want_ids: bool = False,
    want_text: bool = False,
) -> Tokenized:
    """Have the model's worker tokenize a prompt, or only render a chat if `want_text`. Raises `ApiError`."""
    if isinstance(prompt, ChatPrompt):
        prompt = await with_media(services, record, model, prompt)
    estimate = (record.body_bytes - record.encoded_bytes) / BYTES_PER_TOKEN + likely_tokens(record.media)
    return await call_worker(services, record, model, estimate, lambda rid: Tokenize(rid, prompt, want_ids, want_text))


async def detokenize(services: Services, record: RequestRecord, model: ModelConfig, ids: tuple[int, ...]) -> Tokenized:
    """Have the model's worker decode token ids to text. Raises `ApiError`."""
    return await call_worker(services, record, model, len(ids), lambda rid: Detokenize(rid, ids))


async def call_worker(
    services: Services,
    record: RequestRecord,
    model: ModelConfig,
    estimate: float,
    make_call: Callable[[int], Tokenize | Detokenize],
) -> Tokenized:
    """Send a tokenize or detokenize call of about `estimate` tokens to the model's worker. Raises `ApiError`."""
    caller = record.caller
    quota_percent = caller.queue_quota_percent
    with ExitStack() as held:
        held.enter_context(services.admission.tokenize_call(model, caller.key, quota_percent))
        charge = None if caller.meter is None else held.enter_context(caller.meter.tokenize_call(estimate))
        held.enter_context(services.pool.broker.lease(model.name))
        answer = await _answer(services, record, model, make_call)
        if charge is not None:
            charge.prompt = answer.count
        return answer


async def _answer(
    services: Services, record: RequestRecord, model: ModelConfig, make_call: Callable[[int], Tokenize | Detokenize]
) -> Tokenized:
    try:
        async with asyncio.timeout(services.config.server.queue_timeout_s or None):
            worker = await services.pool.ensure_ready(model.name)
            check(model.name, model.path, worker.ready, record.media)
            answer = await services.link.call(worker.epoch, make_call(services.link.next_rid()))
            assert isinstance(answer, Tokenized)
            return answer
    except (ModelUnavailable, CallRefused) as error:
        wait_s = getattr(error, "retry_after_s", 0.0)
        raise from_failure(error.failure, wait_s, is_operator=record.caller.is_admin) from None
    except Unsendable as error:
        services.metrics.rejected(model.name, "unsendable")
        raise from_unsendable(error) from None
    except (WorkerGone, TimeoutError):
        raise Unavailable("The model's worker did not answer. Try again.", BUSY_RETRY_AFTER_S) from None


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Vectors:
    """Numbers of an answer. `data` has `count` rows of equal length, in float32, little-endian."""

    data: bytes
    count: int
    prompt_tokens: int
    headers: list[Header]
    cached_tokens: int = 0

    @property
    def dimensions(self) -> int:
        return len(self.data) // 4 // self.count

    def base64(self, row: int) -> str:
        """Return a row in the base64 encoding that OpenAI's SDK reads."""
        return base64.b64encode(self._row(row)).decode("ascii")

    def numbers(self, row: int) -> list[float]:
        numbers = array("f", self._row(row))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    def _row(self, row: int) -> bytes:
        size = 4 * self.dimensions
        return self.data[row * size : (row + 1) * size]


class VectorFold:
    """`Fold` that collects the numbers of a request."""

    def __init__(self) -> None:
        self.data = b""
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def bind(self, rids: Sequence[int]) -> None:
        """Ignore the request ids, because a request has only one."""

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.data += delta.data
            if delta.usage is not None:
                self.prompt_tokens, self.cached_tokens = delta.usage.prompt, delta.usage.cached

    def result(self) -> bytes:
        return self.data


async def respond_vectors(
    job: PreparedRequest, count: int, render: Callable[[Vectors], bytes], receive: Receive, send: Send
) -> None:
    """Answer with the numbers, encoded by `render`. If there are many, the thread for large bodies encodes them."""
    fold = VectorFold()
    async with cut_off(job.record, receive):
        with job.generation(fold.bind) as generation:
            data = await folded(generation, fold)
            vectors = Vectors(data, count, fold.prompt_tokens, generation.headers, fold.cached_tokens)
        body = await job.services.bodies.work(len(vectors.data), render, vectors)
        await send_body(send, 200, body, vectors.headers)
