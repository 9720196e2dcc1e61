"""Batch APIs of OpenAI (`/v1/batches`) and of Anthropic (`/v1/messages/batches`).

`/v1/batches`: OpenAI's Batch API.

`/v1/messages/batches`: Anthropic's Message Batches API.
"""

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.batches.batch_lines import (
    ANTHROPIC_PREFIX,
    LINES_MAX,
    METHOD,
    OPENAI_PREFIX,
    BatchTokens,
    InputLine,
    LineProblem,
    StoredBatch,
    new_name,
)
from gateway.api.batches.batch_runner import BatchRunner
from gateway.api.batches.batch_store import ERRORS, OUTPUT, BatchStore, NoSuchFile
from gateway.api.batches.files import (
    DEFAULT_LIMIT,
    JSON_LINES,
    Anchor,
    ExpirySeconds,
    UploadedContent,
    check_expiry,
    limit_of,
    page_after,
    page_before,
    path_id,
    send_content,
)
from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import shape, words
from gateway.errors import BadRequest, invalid_choice
from gateway.http.bodies import send_body
from gateway.request.record import ignored_header, record_of
from gateway.services import Services

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW: Final = "24h"
WINDOW_S: Final = 86400.0
PAGE_MAX: Final = 100
METADATA_MAX: Final = 16
METADATA_KEY_CHARS_MAX: Final = 64
METADATA_VALUE_CHARS_MAX: Final = 512
_METADATA: Final = {
    "maxProperties": METADATA_MAX,
    "propertyNames": {"maxLength": METADATA_KEY_CHARS_MAX},
    "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARS_MAX},
}

_encode = msgspec.json.Encoder().encode


class OutputExpiry(Struct, frozen=True):
    """Age at which the output files are deleted."""

    anchor: Anchor
    seconds: ExpirySeconds


class BatchRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/batches`. The input file has one request in each line."""

    input_file_id: str
    endpoint: Annotated[str, words(*ENDPOINTS)]
    completion_window: Annotated[str, words(WINDOW)]
    metadata: Annotated[dict[str, str], shape(_METADATA)] | None = None
    output_expires_after: OutputExpiry | None = None


class BatchProblems(Struct, frozen=True, tag_field="object", tag="list"):
    data: list[LineProblem]


class BatchCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class BatchInputDetails(Struct, frozen=True):
    cached_tokens: int


class BatchOutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class BatchUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class OpenAIBatch(Struct, frozen=True, kw_only=True, tag_field="object", tag="batch"):
    """State of a batch. Times are whole seconds since 1970."""

    id: str
    endpoint: str
    model: str | None
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str = WINDOW
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(Struct, frozen=True, tag_field="object", tag="list"):
    data: list[OpenAIBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


_schema = Schema(BatchRequest)


class OpenAIBatches:
    """Endpoints of batches. Each is an ASGI handler."""

    def __init__(
        self, services: Services, store: BatchStore, runner: BatchRunner, wall: Callable[[], float] = time.time
    ) -> None:
        self._services = services
        self._store = store
        self._runner = runner
        self._wall = wall

    async def create_or_list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST` and `GET` of `/v1/batches`."""
        if scope["method"] == "POST":
            await self._create(scope, receive, send)
            return
        query = QueryParams(scope["query_string"])
        own = self._store.batches_of(record_of(scope).caller.owner, is_anthropic=False)
        page, has_more = page_after(own, query.get("after"), limit_of(query, DEFAULT_LIMIT, PAGE_MAX))
        ids = [batch.id for batch in page] or [None]
        listed = [batch_view(self._runner.view(batch)) for batch in page]
        await send_body(send, 200, _encode(BatchList(listed, ids[0], ids[-1], has_more)))

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /v1/batches/{id}`."""
        batch = self._store.batch(record_of(scope).caller.owner, path_id(scope), is_anthropic=False)
        await send_body(send, 200, _encode(batch_view(self._runner.view(batch))))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/batches/{id}/cancel`."""
        batch = self._store.batch(record_of(scope).caller.owner, path_id(scope), is_anthropic=False)
        if batch.has_ended:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise BadRequest(message, code="invalid_batch_status")
        await send_body(send, 200, _encode(batch_view(await self._runner.cancel(batch))))

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        tenant = record.caller.owner
        self._store.check_on()
        request, unknown = await serve.read(self._services, record, scope, receive, _schema.decode)
        _check(request)
        file = self._store.files.get(request.input_file_id)
        if file is None or file.tenant != tenant:
            raise NoSuchFile(request.input_file_id)
        if file.purpose != "batch":
            raise BadRequest(f"The purpose of {file.id} is '{file.purpose}', not 'batch'.", "input_file_id")
        self._store.check_room(tenant, file.size_bytes)
        expiry = request.output_expires_after
        now = self._wall()
        batch = StoredBatch(
            id=new_name(OPENAI_PREFIX),
            tenant=tenant,
            key=record.caller.key,
            is_everybodys=record.caller.is_anonymous,
            endpoint=request.endpoint,
            created=now,
            expires=now + WINDOW_S,
            status="validating",
            input_file=file.id,
            metadata=request.metadata,
            output_age_s=None if expiry is None else expiry.seconds,
        )
        await self._store.add_batch(batch)
        self._runner.add(batch)
        await send_body(send, 200, _encode(batch_view(batch)), ignored_header(unknown))


def batch_view(batch: StoredBatch) -> OpenAIBatch:
    """Return a batch in OpenAI's form."""
    reached = {status: int(at) for status, at in batch.reached.items()}
    succeeded = batch.counts.get("succeeded", 0)
    problems = list(batch.problems)
    return OpenAIBatch(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=BatchProblems(problems) if problems else None,
        input_file_id=batch.input_file,
        status=batch.status,
        # The files are readable once the batch has ended.
        output_file_id=(batch.output_file or None) if batch.has_ended else None,
        error_file_id=(batch.error_file or None) if batch.has_ended else None,
        created_at=int(batch.created),
        in_progress_at=reached.get("in_progress"),
        expires_at=int(batch.expires),
        finalizing_at=reached.get("finalizing"),
        completed_at=reached.get("completed"),
        failed_at=reached.get("failed"),
        expired_at=reached.get("expired"),
        cancelling_at=reached.get("cancelling"),
        cancelled_at=reached.get("cancelled"),
        request_counts=BatchCounts(batch.total, succeeded, sum(batch.counts.values()) - succeeded),
        usage=None if batch.tokens is None else usage_view(batch.tokens),
        metadata=batch.metadata,
    )


def usage_view(tokens: BatchTokens) -> BatchUsage:
    """Return the tokens of a batch in OpenAI's form."""
    return BatchUsage(
        tokens.prompt,
        BatchInputDetails(tokens.cached),
        tokens.completion,
        BatchOutputDetails(tokens.reasoning),
        tokens.prompt + tokens.completion,
    )


def _check(request: BatchRequest) -> None:
    """Raises `BadRequest` for values that are not served."""
    if request.endpoint not in ENDPOINTS:
        raise invalid_choice(request.endpoint, ENDPOINTS, "endpoint")
    if request.completion_window != WINDOW:
        raise invalid_choice(request.completion_window, (WINDOW,), "completion_window")
    if request.output_expires_after is not None:
        check_expiry(request.output_expires_after.anchor, request.output_expires_after.seconds, "output_expires_after")
    metadata = request.metadata or {}
    if len(metadata) > METADATA_MAX:
        raise BadRequest(f"'metadata' has more than {METADATA_MAX} keys.", "metadata", "invalid_value")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            most = f"{METADATA_KEY_CHARS_MAX} characters, or a value more than {METADATA_VALUE_CHARS_MAX}"
            raise BadRequest(f"A key of 'metadata' has more than {most}.", "metadata", "invalid_value")


ENDPOINT: Final = "/v1/messages"
MESSAGE_PAGE_MAX: Final = 1000
CUSTOM_ID: Final = r"^[a-zA-Z0-9_-]{1,64}$"
_CUSTOM_ID: Final = re.compile(CUSTOM_ID)
# In JSON, line breaks occur only between values. A line of the input file must have none.
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


class BatchedMessage(Struct, frozen=True):
    """One request. `params` is the body of a request to `/v1/messages`."""

    custom_id: Annotated[str, Meta(extra_json_schema={"pattern": CUSTOM_ID})]
    params: Annotated[Raw, shape({"type": "object"})]


class MessageBatchRequest(Struct, frozen=True):
    """`POST /v1/messages/batches`."""

    requests: Annotated[list[BatchedMessage], shape({"minItems": 1, "maxItems": LINES_MAX})]


class MessageBatchCounts(Struct, frozen=True):
    """Numbers of requests. All of them are `processing` until the batch has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_batch"):
    """State of a batch. Times are in RFC 3339."""

    id: str
    processing_status: str
    request_counts: MessageBatchCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: None = None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchList(Struct, frozen=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, frozen=True, tag_field="type", tag="message_batch_deleted"):
    id: str


_message_schema = Schema(MessageBatchRequest, listed="requests", item=BatchedMessage)


class MessageBatches:
    """Endpoints of message batches. Each is an ASGI handler."""

    def __init__(
        self, services: Services, store: BatchStore, runner: BatchRunner, wall: Callable[[], float] = time.time
    ) -> None:
        self._services = services
        self._store = store
        self._runner = runner
        self._wall = wall

    async def create_or_list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST` and `GET` of `/v1/messages/batches`."""
        if scope["method"] == "POST":
            await self._create(scope, receive, send)
            return
        query = QueryParams(scope["query_string"])
        own = self._store.batches_of(record_of(scope).caller.owner, is_anthropic=True)
        limit, after, before = (
            limit_of(query, DEFAULT_LIMIT, MESSAGE_PAGE_MAX),
            query.get("after_id"),
            query.get("before_id"),
        )
        if after is not None and before is not None:
            raise BadRequest("Send 'after_id' or 'before_id', not both.", "before_id", "invalid_value")
        page, has_more = page_after(own, after, limit) if before is None else page_before(own, before, limit)
        ids = [batch.id for batch in page] or [None]
        listed = [self._view(batch, scope) for batch in page]
        await send_body(send, 200, _encode(MessageBatchList(listed, has_more, ids[0], ids[-1])))

    async def get_or_delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET` and `DELETE` of `/v1/messages/batches/{id}`."""
        batch = self._batch(scope)
        if scope["method"] != "DELETE":
            await send_body(send, 200, _encode(self._view(batch, scope)))
            return
        if not batch.has_ended:
            raise BadRequest("This batch has not ended: cancel it before it is deleted.", code="invalid_batch_status")
        await self._store.delete(batch.id)
        await send_body(send, 200, _encode(DeletedMessageBatch(batch.id)))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/messages/batches/{id}/cancel`. A batch that has ended is sent unchanged."""
        batch = await self._runner.cancel(self._batch(scope))
        await send_body(send, 200, _encode(self._view(batch, scope)))

    async def results(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /v1/messages/batches/{id}/results`."""
        batch, folder = self._batch(scope), self._store.folder
        if not batch.has_ended:
            message = f"The batch {batch.id} has not ended, and has no results yet."
            raise BadRequest(message, code="invalid_batch_status")

        async def read(suffix: str, offset: int, size: int) -> bytes:
            return await self._store.run(lambda: folder.read(folder.part(batch.id, suffix), offset, size))

        sizes = await self._store.run(
            lambda: [(suffix, size_of(folder.part(batch.id, suffix))) for suffix in (OUTPUT, ERRORS)]
        )
        await send_content(send, sizes, read, JSON_LINES)

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        tenant = record.caller.owner
        self._store.check_on()
        request, unknown = await serve.read(services, record, scope, receive, _message_schema.decode)
        lines = await services.bodies.work(record.body_bytes, input_lines, request)
        async with UploadedContent(self._store, tenant) as content:
            for line in lines:
                content.add(line)
                await content.flush()
            await content.close()
            now = self._wall()
            batch = StoredBatch(
                id=new_name(ANTHROPIC_PREFIX),
                tenant=tenant,
                key=record.caller.key,
                is_everybodys=record.caller.is_anonymous,
                endpoint=ENDPOINT,
                created=now,
                expires=now + WINDOW_S,
                status="validating",
                total=len(lines),
            )
            await self._store.add_upload(content.path, content.size_bytes, batch)
            content.take()
        self._runner.add(batch)
        await send_body(send, 200, _encode(self._view(batch, scope)), ignored_header(unknown))

    def _batch(self, scope: Scope) -> StoredBatch:
        batch = self._store.batch(record_of(scope).caller.owner, path_id(scope), is_anthropic=True)
        return self._runner.view(batch)

    def _view(self, batch: StoredBatch, scope: Scope) -> MessageBatch:
        """Return a batch in Anthropic's form."""
        counts: dict[str, Any] = dict(batch.counts) if batch.has_ended else {}
        ended = next((batch.reached[status] for status in ("completed", "cancelled", "expired", "failed")
                      if status in batch.reached), None)  # fmt: skip
        cancelled = batch.reached.get("cancelling")
        status = "ended" if batch.has_ended else "canceling" if batch.status == "cancelling" else "in_progress"
        return MessageBatch(
            id=batch.id,
            processing_status=status,
            request_counts=MessageBatchCounts(
                0 if batch.has_ended else batch.total,
                *(counts.get(outcome, 0) for outcome in ("succeeded", "errored", "canceled", "expired")),
            ),
            ended_at=None if ended is None else _time(ended),
            created_at=_time(batch.created),
            expires_at=_time(batch.expires),
            cancel_initiated_at=None if cancelled is None else _time(cancelled),
            results_url=f"{_base_url(scope)}{ENDPOINT}/batches/{batch.id}/results" if batch.has_ended else None,
        )


def input_lines(request: MessageBatchRequest) -> list[bytes]:
    """Return the lines of the input file. May run in any thread. Raises `BadRequest`."""
    if not 1 <= len(request.requests) <= LINES_MAX:
        raise BadRequest(f"'requests' has {len(request.requests)} requests; 1 to {LINES_MAX} are taken.", "requests")
    seen = set[str]()
    lines = list[bytes]()
    for at, each in enumerate(request.requests):
        if _CUSTOM_ID.fullmatch(each.custom_id) is None:
            raise BadRequest(f"requests.{at}.custom_id: does not match {CUSTOM_ID}", f"requests.{at}.custom_id")
        if each.custom_id in seen:
            raise BadRequest(f"requests.{at}.custom_id: {each.custom_id!r} is not unique", f"requests.{at}.custom_id")
        seen.add(each.custom_id)
        params = Raw(bytes(each.params).translate(_ONE_LINE))
        lines.append(_encode(InputLine(each.custom_id, METHOD, ENDPOINT, params)) + b"\n")
    return lines


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _base_url(scope: Scope) -> str:
    """Return the beginning of URLs under which the client has reached the daemon."""
    host = Headers(scope=scope).get("host", "")
    return f"{scope.get('scheme', 'http')}://{host}" if host else ""
