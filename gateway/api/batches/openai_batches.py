"""`/v1/batches`: OpenAI's Batch API."""

import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.batches.batch_runner import BatchRunner
from gateway.api.batches.batch_store import BatchStore, NoSuchFile
from gateway.api.batches.files import Anchor, ExpirySeconds, check_expiry
from gateway.api.batches.paging import DEFAULT_LIMIT, limit_of, page_after, path_id
from gateway.api.batches.records import OPENAI_PREFIX, BatchTokens, LineProblem, StoredBatch, new_name
from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import shape, words
from gateway.errors import BadRequest, invalid_choice
from gateway.http.exchange import send_body
from gateway.request.headers import ignored_header
from gateway.request.record import record_of
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
