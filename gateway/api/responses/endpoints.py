"""`/v1/responses`: create responses by HTTP and WebSocket; retrieve, delete, cancel and compact them, count tokens.

Answers with responses and their input items. Each answer is encoded once for all clients that read it.

Compaction of a conversation: the user's messages, and the model's summary of the rest.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.canonical import with_thinking
from gateway.api.common.request_fields import extras_of
from gateway.api.common.thinking import lower_thinking
from gateway.api.responses import journal
from gateway.api.responses import response as out
from gateway.api.responses.background import (
    EVENTS_GONE_MESSAGE,
    Background,
    Backgrounds,
    failed_by_restart,
    keep_nothing,
)
from gateway.api.responses.encoder import (
    ResponseEncoder,
    ResponseRun,
    diagnostics_of,
    echo,
    large_bytes,
    with_large_encoded,
)
from gateway.api.responses.history import (
    ResponseHistory,
    has_ended,
    id_of,
    inputs_of,
    numbered,
    stem_of,
    with_stored_media,
)
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.journal import JournaledRequest, ResponseJournals
from gateway.api.responses.lowering import lower_prompt, lower_responses, prewarming, seal
from gateway.api.responses.request import (
    ContentPart,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
    Toolbox,
    decode_count,
    decode_create,
    decode_responses,
    toolbox,
)
from gateway.api.responses.response_socket import ResponseSockets
from gateway.api.responses.resumption import Resumption
from gateway.api.responses.socket_turn import SocketTurn, turn_of
from gateway.api.responses.store import STORE_AGE_S, Store, StoredResponse
from gateway.config.settings import Config, ModelConfig, ServerConfig
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.errors import ApiError, BadRequest
from gateway.http.bodies import SharedAnswers, reserve, send_body
from gateway.http.direct_write import writer_of
from gateway.http.sse import cut_off
from gateway.request.record import Header, RequestRecord, record_of
from gateway.services import Services
from protocol.from_worker import Delta, DeltaKind, Usage
from protocol.to_worker import ChatPrompt, Generate, Media

_encode = msgspec.json.Encoder().encode


class Retrieval:
    """Sends responses or their items. Methods raise `Unavailable` if there is no memory for the answer."""

    def __init__(self, services: Services, history: ResponseHistory) -> None:
        self._services = services
        self._history = history
        self._answers = SharedAnswers(services.bodies)

    async def send_state(
        self, run: ResponseRun, state: out.Response, record: RequestRecord, send: Send, headers: Sequence[Header] = ()
    ) -> None:
        """Send the current state of a response."""
        size = run.size_bytes
        make = partial(self._services.bodies.work, size, _encode, state)
        key = (state.id, state.status, run.output.deltas)
        async with self._answers.reading(record, key, size, make) as body:
            await send_body(send, 200, body, [*headers])

    async def send_stored(self, response_id: str, record: RequestRecord, send: Send) -> None:
        """Send a stored response. Raises `ResponseNotFound`."""
        tenant = record.caller.owner
        size = (await self._history.sizes(tenant, response_id)).body_bytes

        async def make() -> bytes:
            stored = await self._history.get(tenant, response_id)
            return await self._services.bodies.work(size, _ended, stored)

        async with self._answers.reading(record, (response_id, size), size, make) as body:
            await send_body(send, 200, body)

    async def send_events(self, background: Background, after: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events after event number `after`. Raises `BadRequest`."""
        record, events = record_of(scope), background.events
        # Readers may keep the fields in memory after the response was dropped.
        async with self._answers.reading(record, (background.id, "echo"), events.echo_bytes, _no_copy):
            await background.answer(after, scope, receive, send)

    async def send_items(
        self, response_id: str, query: QueryParams, limit: int, record: RequestRecord, send: Send
    ) -> None:
        """Send a page of the input items, including the conversation before the response.

        Raises `ResponseNotFound` and `BadRequest`.
        """
        tenant, history, work = record.caller.owner, self._history, self._services.bodies.work
        sizes = await history.sizes(tenant, response_id)

        async def make() -> bytes:
            before = await history.before(record, sizes.previous)
            record.body_bytes += sizes.inputs_bytes
            await reserve(record, min(record.body_bytes, self._services.bodies.largest_bytes()))
            stored = await history.get(tenant, response_id)
            page = await work(record.body_bytes, _page, before, stored, query, limit)
            assert record.lease is not None, "the middleware makes one for each request"
            # The memory of the items is freed here; the page has its own reservation.
            record.lease.close()
            return page

        key = (response_id, query.get("order"), query.get("after"), limit)
        async with self._answers.reading(record, key, 0, make) as body:
            await send_body(send, 200, body)


async def _no_copy() -> bytes:
    return b""


def _ended(stored: StoredResponse) -> bytes:
    return stored.body if has_ended(stored) else failed_by_restart(stored.body)


def _page(before: list[InputItem], stored: StoredResponse, query: QueryParams, limit: int) -> bytes:
    """Return a page of input items, by default the newest first. Raises `BadRequest`."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("Invalid value for 'order': expected asc or desc.", "order", "invalid_value")
    items = [*before, *inputs_of(stored)]
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item.id == after]
        if not places:
            raise BadRequest(f"There is no item {after[:100]!r} here.", "after", "invalid_value")
        ordered = ordered[places[-1] + 1 :]
    page = ordered[:limit]
    ids = [item.id for item in page] or [None]
    return _encode(out.ItemList(page, ids[0], ids[-1], len(ordered) > len(page)))


SUMMARY_TOKENS_MAX: Final = 4096
SUMMARY_INSTRUCTION: Final = (
    "Summarize our conversation so far, for yourself: from now on you will see your summary and my messages only. "
    "Keep what is needed to go on: decisions, facts, names of files, results of tools, and what is still to be done. "
    "Answer with the summary alone."
)


def summary_request(request: InputTokensRequest) -> ResponsesRequest:
    """Return the request for a summary of the conversation of `request`, without tools or reasoning."""
    return ResponsesRequest(
        model=request.model,
        instructions=request.instructions,
        input=SUMMARY_INSTRUCTION,
        reasoning_effort="none",
        max_output_tokens=SUMMARY_TOKENS_MAX,
        store=False,
    )


class SummaryFold:
    """`Fold` that collects the model's summary. The answer has the summary and the user's messages of the
    conversation.
    """

    def __init__(self, conversation: Sequence[InputItem]) -> None:
        self._conversation = conversation
        self._texts: list[str] = []
        self._usage = Usage(0, 0, 0)

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "a summary is one sequence"

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.kind is DeltaKind.TEXT:
                self._texts.append(delta.text)
            if delta.usage is not None:
                self._usage = delta.usage

    def result(self) -> bytes:
        stem = secrets.token_hex(20)
        kept = [
            _listed(item)
            for item in numbered(self._conversation, stem)
            if item.kind == "message" and item.role == "user"
        ]
        summary = InputItem("compaction", f"cmp_{stem}", encrypted_content=seal("".join(self._texts)))
        usage = out.ResponseUsage.of(self._usage)
        return _encode(out.CompactedResponse(id_of(stem), serve.now(), [*kept, summary], usage))


def _listed(item: InputItem) -> InputItem:
    content = [ContentPart("input_text", item.content)] if isinstance(item.content, str) else item.content
    return msgspec.structs.replace(item, content=content, status="completed")


T = TypeVar("T", bound=InputTokensRequest)

ITEMS_MAX: Final = 100
ITEMS_DEFAULT: Final = 20
EVENT_NUMBER_DIGITS_MAX: Final = 12
SEALED: Final = "reasoning.encrypted_content"


class Responses:
    """The Responses API with its state on disk. Methods with a `scope` argument are ASGI handlers."""

    def __init__(
        self,
        services: Services,
        config: Config,
        wall: Callable[[], float] = time.time,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self._services = services
        self._wall = wall
        server, problems = config.server, services.metrics.store_problems
        self._store = Store(
            config.store_path,
            server.response_store_bytes,
            STORE_AGE_S,
            problems=problems,
            make_thread=make_thread,
            disk=disk,
        )
        self._journals = ResponseJournals(
            config.journal_dir,
            lambda: journal.JOURNALS_BYTES_MAX if services.config.server.response_store_bytes else 0,
            problems,
            lambda: services.keyring.has_others,
            make_thread,
            disk,
        )
        self._backgrounds = Backgrounds(services, self._store, self._journals)
        self._history = ResponseHistory(
            self._store, lambda: services.config.server.max_body_bytes, self._backgrounds.is_running
        )
        self._retrieval = Retrieval(services, self._history)
        self._sockets = ResponseSockets(services)
        # Tenant and run of each response that is being streamed, by the response's id.
        self._running: dict[str, tuple[str, ResponseRun]] = {}
        # An existing database is checked now, so that the first client that needs it does not wait.
        self.apply(server)
        services.keyring.watchers.append(self._drop_revoked)
        self._store.keep_tenants(services.keyring.owners)

    async def resume(self) -> None:
        """Resume the responses that an earlier daemon left. Call it before any request is served."""
        await Resumption(self._services, self._history, self._journals, self._backgrounds, self._wall).run()

    def _drop_revoked(self, owners: frozenset[str]) -> None:
        """Delete the responses of revoked keys, and end those that are being generated."""
        self._backgrounds.drop_revoked(owners)
        self._store.keep_tenants(owners)

    def drain(self) -> None:
        """Close each WebSocket once no response runs on it."""
        self._sockets.end()

    def leave(self) -> None:
        """Leave background responses to the next daemon immediately."""
        self._backgrounds.leave()

    def apply(self, server: ServerConfig) -> None:
        """Apply the limits of this configuration."""
        self._store.limit(server.response_store_bytes, STORE_AGE_S)

    def close(self) -> None:
        """Finish writing to the disk. No method may be called after this."""
        self._journals.close()
        self._store.close()

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/responses`."""
        services, record, turn = self._services, record_of(scope), turn_of(scope)
        decode = decode_responses if turn is None else decode_create
        request, ignored = await serve.read(services, record, scope, receive, decode)
        if turn is not None:
            request = turn.steered(request)
        request, before = await self._resolved(record, request, turn)
        box = toolbox(request)
        model, seed, prompt = await self._begin(record, request, before, box, ignored)
        if request.generate is False:
            prompt = prewarming(prompt)
        job = await serve.prepare(services, record, model, _lowering(request, prompt, model, seed))
        is_stored = self._history.is_on and request.store is not False
        response = echo(request, box, model, id_of(secrets.token_hex(20)), serve.now(), is_stored)
        run, inputs = await self._run(request, response, box, record, prompt.media)
        record.answer_id = response.id
        if turn is not None and (not is_stored or turn.conversation(request.previous_response_id)):
            run.keep = _both(run.keep, turn.keeper([*before, *request.items], record.body_bytes))
        background = self._started(run, job, response, inputs) if request.background else None
        encoder, is_stream = ResponseEncoder(run), request.stream
        if turn is not None:
            turn.begin(request, before, run, encoder)
        # The run has the large fields encoded: the decoded ones are not kept until the answer ends.
        del request, response, before, box, prompt, inputs
        if background is not None:
            await self._send_background(background, scope, receive, send)
            return
        if not is_stream:
            await job.whole(encoder, receive, send, encoder.parts)
            return
        self._running[run.response.id] = (record.caller.owner, run)
        slice_events = partial(encoder.slices, writer=writer_of(scope))
        try:
            await job.stream(encoder, receive, send, slice_events=slice_events)
        finally:
            del self._running[run.response.id]

    async def connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a WebSocket at `/v1/responses`."""
        await self._sockets.serve(scope)

    async def compact(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/responses/compact`."""
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_count)
        request, before = await self._resolved(record, request)
        conversation = [*before, *request.items]
        # The request is lowered only to refuse a conversation that could not be continued.
        await services.bodies.work(record.body_bytes, lower_prompt, request, toolbox(request), before)
        asking = summary_request(request)
        model, seed, prompt = await self._begin(record, asking, conversation, toolbox(asking), ignored)
        job = await serve.prepare(services, record, model, _lowering(asking, prompt, model, seed))
        await job.whole(SummaryFold(conversation), receive, send)

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/responses/input_tokens`."""
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_count)
        request, before = await self._resolved(record, request)
        model, _, prompt = await self._begin(record, request, before, toolbox(request), ignored)
        prompt = with_thinking(prompt, lower_thinking(request, model.thinking))
        async with cut_off(record, receive):
            tokenized = await serve.tokenize(services, record, model, prompt)
            await send_body(send, 200, _encode(out.InputTokenCount(tokenized.count)), record.headers)

    async def get_or_delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET` and `DELETE` of `/v1/responses/{id}`."""
        record = record_of(scope)
        tenant, response_id = record.caller.owner, _path_id(scope)
        background, run = self._find(tenant, response_id)
        if scope["method"] == "DELETE":
            if background is not None:
                await self._backgrounds.forget(background)
            await self._history.delete(tenant, response_id)
            await send_body(send, 200, _encode(out.DeletedResponse(response_id)))
        elif (after := _starting_after(QueryParams(scope["query_string"]))) is not None:
            if background is None:
                if run is None:
                    # This raises `ResponseNotFound` if no response has this id.
                    await self._history.sizes(tenant, response_id)
                raise BadRequest(EVENTS_GONE_MESSAGE, "stream", "events_gone")
            await self._retrieval.send_events(background, after, scope, receive, send)
        elif run is not None:
            state = run.snapshot() if background is None else await background.state()
            await self._retrieval.send_state(run, state, record, send)
        else:
            await self._retrieval.send_stored(response_id, record, send)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /v1/responses/{id}/cancel`. A response that has ended is sent unchanged."""
        record, response_id = record_of(scope), _path_id(scope)
        background, run = self._find(record.caller.owner, response_id)
        if run is None:
            await self._retrieval.send_stored(response_id, record, send)
            return
        if background is None:
            state = run.cancel()
        else:
            background.cancel()
            state = await background.state()
        await self._retrieval.send_state(run, state, record, send)

    async def list_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /v1/responses/{id}/input_items`: a page of the input and the conversation before it."""
        query = QueryParams(scope["query_string"])
        await self._retrieval.send_items(_path_id(scope), query, _limit(query), record_of(scope), send)

    def _find(self, tenant: str, response_id: str) -> tuple[Background | None, ResponseRun | None]:
        """Find the tenant's response that is being generated or ended recently.

        Returns its `Background`, None for a response that is only streamed, and its run, None if there is no such
        response.
        """
        background = self._backgrounds.find(tenant, response_id)
        if background is not None:
            return background, background.run
        owner, run = self._running.get(response_id, (tenant, None))
        return None, run if owner == tenant else None

    async def _resolved(
        self, record: RequestRecord, request: T, turn: SocketTurn | None = None
    ) -> tuple[T, list[InputItem]]:
        """Return the request with its references resolved, and the conversation before it. Raises `ApiError`."""
        items = await self._history.resolved(record, request.items)
        if turn is not None and (origin := turn.origin(request.previous_response_id)) is not None:
            # A fork does not name the response, because what that response says from now on is not in the fork.
            assert origin.run is not None
            said = await self._history.admitted(record, origin.run.size_bytes, origin.so_far())
            return msgspec.structs.replace(request, input=[*said, *items], previous_response_id=None), []
        known = None if turn is None else turn.conversation(request.previous_response_id)
        if known is None:
            before = await self._history.before(record, request.previous_response_id)
        else:
            before = await self._history.admitted(record, known.size_bytes, known.items)
        return msgspec.structs.replace(request, input=items), before

    async def _begin(
        self,
        record: RequestRecord,
        request: InputTokensRequest,
        before: list[InputItem],
        box: Toolbox,
        ignored: list[str],
    ) -> tuple[ModelConfig, int, ChatPrompt]:
        """Return the model, the seed, and the prompt with its media and documents. Raises `ApiError`."""
        services = self._services
        prompt, left_out = await services.bodies.work(record.body_bytes, lower_prompt, request, box, before)
        ignored = list(dict.fromkeys([*ignored, *box.ignored, *left_out]))
        asked = (bool(request.stream), request.seed) if isinstance(request, ResponsesRequest) else (False, None)
        model, seed = serve.begin(services, record, request.model, *asked, ignored)
        return model, seed, await serve.read_media(services, record, model, prompt, self._history.media(record))

    def _started(
        self, run: ResponseRun, job: serve.PreparedRequest, response: out.Response, inputs: list[InputItem]
    ) -> Background:
        """Start a background response."""
        if not self._history.is_on:
            raise BadRequest("'background' needs [server] response_store, which is off.", "background")
        journaled = _journaled(run, job, response, inputs, self._wall())
        return self._backgrounds.start(run, job, job.record.caller.owner, journaled)

    async def _send_background(self, background: Background, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the state of a background response, or with its events if the request asks for a stream."""
        record = record_of(scope)
        # An id that a client knows must mean the same response to the next daemon.
        await background.journal.begin()
        try:
            if record.stream:
                await self._retrieval.send_events(background, -1, scope, receive, send)
            else:
                state = await background.state()
                await self._retrieval.send_state(background.run, state, record, send, record.headers)
        except ApiError:
            # The client has not learned the response's id and will send its request again.
            await self._backgrounds.forget(background)
            raise

    async def _run(
        self,
        request: ResponsesRequest,
        response: out.Response,
        box: Toolbox,
        record: RequestRecord,
        media: Sequence[Media],
    ) -> tuple[ResponseRun, list[InputItem]]:
        """Return the run of the response, and the response's input items in the form in which they are stored.

        Raises `Unavailable` if there is no memory for the encoded fields.
        """
        stem, bodies = stem_of(response), self._services.bodies
        response = await bodies.work(record.body_bytes, with_large_encoded, response)
        # The lease of the body is enough, unless a field is larger with its defaults filled in.
        await reserve(record, min(large_bytes(response), bodies.largest_bytes()))
        inputs = numbered(with_stored_media(request.items, media), stem)
        size = record.body_bytes - record.encoded_bytes
        keep = self._history.keeper(record.caller.owner, inputs, media, size) if response.store else keep_nothing
        output = ResponseOutput(stem, box.forms, request.includes(SEALED))
        stop = partial(self._services.link.stop, reason="cancelled")
        diagnostics = diagnostics_of(self._services, record, request)
        extras = extras_of(request.x_mlxd, record)
        run = ResponseRun(response, output, serve.now, keep, stop, record.body_bytes, diagnostics, extras)
        return run, inputs


def _both(
    store: Callable[[out.Response], Future[bool]], keep: Callable[[out.Response], None]
) -> Callable[[out.Response], Future[bool]]:
    """Return a function that keeps a response on its socket, and stores it with the result of `store`."""

    def store_and_keep(response: out.Response) -> Future[bool]:
        keep(response)
        return store(response)

    return store_and_keep


def _lowering(
    request: ResponsesRequest, prompt: ChatPrompt, model: ModelConfig, seed: int
) -> Callable[[Callable[[], int], int], Generate]:
    return lambda next_rid, deadline_ms: lower_responses(request, prompt, model, next_rid, seed, deadline_ms)


def _journaled(
    run: ResponseRun, job: serve.PreparedRequest, response: out.Response, inputs: list[InputItem], now: float
) -> JournaledRequest:
    # The journal needs the decoded fields, which `run.response` no longer has.
    record, model, generate = job.record, job.model, job.generates[0]
    return JournaledRequest(
        key=record.caller.key,
        model=model.full_name,
        path=model.root,
        request_id=record.id,
        response=response,
        generate=generate,
        inputs=inputs,
        forms=run.output.forms,
        is_sealed=run.output.is_sealed,
        body_bytes=record.body_bytes,
        began=now - (record.clock() - record.started),
        limit_s=generate.deadline_ms / 1000,
        is_everybodys=record.caller.is_anonymous,
        owner=record.caller.owner,
    )


def _starting_after(query: QueryParams) -> int | None:
    """Return the number of the last event that the client has, or -1 if it has none. Returns None if the client
    requests no stream. Raises `BadRequest`.
    """
    given = query.get("starting_after")
    if query.get("stream", "").lower() != "true":
        if given is not None:
            raise BadRequest("'starting_after' is for 'stream'.", "starting_after", "invalid_value")
        return None
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= EVENT_NUMBER_DIGITS_MAX):
        raise BadRequest("Invalid value for 'starting_after': expected a number.", "starting_after", "invalid_value")
    return int(given)


def _limit(query: QueryParams) -> int:
    """Return the number of items in a page. Raises `BadRequest`."""
    given = query.get("limit", str(ITEMS_DEFAULT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= len(str(ITEMS_MAX)) else 0
    if not 1 <= limit <= ITEMS_MAX:
        raise BadRequest(f"Invalid value for 'limit': expected 1 to {ITEMS_MAX}.", "limit", "invalid_value")
    return limit


def _path_id(scope: Scope) -> str:
    response_id = scope["path_params"]["id"]
    assert isinstance(response_id, str)
    return response_id
