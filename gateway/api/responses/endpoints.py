"""`/v1/responses`: create, retrieve, delete, cancel, list what went in, count tokens."""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.canonical import with_thinking
from gateway.api.common.thinking import lower_thinking
from gateway.api.responses import response as out
from gateway.api.responses.background import GONE, Backgrounds, keep_nothing
from gateway.api.responses.compact import Compact
from gateway.api.responses.echo import echo
from gateway.api.responses.encoder import ResponseFold, ResponseRun, ResponseStream
from gateway.api.responses.history import OWN_MEDIA, ResponseHistory, id_of, numbered, tenant_of, with_stored_media
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.journal import ResponseJournals
from gateway.api.responses.journal_records import JournaledRequest
from gateway.api.responses.lowering import lower_prompt, lower_responses
from gateway.api.responses.request import InputItem, ResponsesRequest, decode_count, decode_responses
from gateway.api.responses.resumption import Resumption
from gateway.api.responses.retrieval import Retrieval
from gateway.api.responses.store import Store
from gateway.api.responses.tools import Toolbox, toolbox
from gateway.config.settings import Config, ModelConfig, ServerConfig
from gateway.errors import ApiError, BadRequest
from gateway.http.exchange import send_body
from gateway.http.sse import cut_off
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.prompts import ChatPrompt, Media
from protocol.to_worker import Generate

ITEMS_MAX: Final = 100
ITEMS_DEFAULT: Final = 20
NUMBER_DIGITS: Final = 12
SEALED: Final = "reasoning.encrypted_content"

# Streams that are being written, with their tenants: no other tenant can know the id.
Running = dict[str, tuple[str, ResponseRun]]

_encode = msgspec.json.Encoder().encode


class Responses:
    """All of the API, with what it keeps on disk."""

    def __init__(self, services: Services, config: Config) -> None:
        self._services = services
        server, problems = config.server, services.metrics.store_problems
        self._store = Store(
            config.store_path, server.response_store_bytes, server.response_store_age_s, problems=problems
        )
        self._journals = ResponseJournals(
            config.journal_dir,
            lambda: services.config.server.response_journal_bytes,
            problems,
            lambda: services.keyring.has_others,
        )
        self._backgrounds = Backgrounds(services, self._store, self._journals)
        self._history = ResponseHistory(
            self._store, lambda: services.config.server.max_body_bytes, self._backgrounds.is_running
        )
        self._retrieval = Retrieval(services, self._history)
        running: Running = {}
        self.create = Create(services, self._history, running, self._backgrounds, self._retrieval)
        self.compact = Compact(services, self._history)
        self.count = CountInputTokens(services, self._history)
        self.one = One(self._history, running, self._backgrounds, self._retrieval)
        self.items = InputItems(self._retrieval)
        # One that is there is checked now, not when the first client comes back to it.
        self.apply(server)

    async def resume(self) -> None:
        """Go on with what an earlier daemon left. Before anything is served."""
        await Resumption(self._services, self._history, self._journals, self._backgrounds).run()

    def leave(self) -> None:
        """Leave background responses to the next daemon, at once."""
        self._backgrounds.leave()

    def apply(self, server: ServerConfig) -> None:
        """Keep as much, and as long, as this configuration says."""
        self._store.limit(server.response_store_bytes, server.response_store_age_s)

    def close(self) -> None:
        """Finish writing what is kept. The last call."""
        self._journals.close()
        self._store.close()


class Create:
    """An ASGI endpoint."""

    def __init__(
        self,
        services: Services,
        history: ResponseHistory,
        running: Running,
        backgrounds: Backgrounds,
        retrieval: Retrieval,
    ) -> None:
        self._services = services
        self._history = history
        self._running = running
        self._backgrounds = backgrounds
        self._retrieval = retrieval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_responses)
        request = msgspec.structs.replace(request, input=await self._history.resolved(record, request.items))
        before = await self._history.before(record, request.previous_response_id)
        box = toolbox(request)
        prompt, left_out = await services.bodies.work(record.body_bytes, lower_prompt, request, box, before)
        ignored = list(dict.fromkeys([*ignored, *box.ignored, *left_out]))
        stream = bool(request.stream)
        model, seed = serve.begin(services, record, request.model, stream, request.seed, ignored)
        prompt = await serve.with_media(services, record, model, prompt, self._history.media(record))
        generates = await serve.lower(services, record, model, _lowering(services, request, prompt, model, seed))
        run, inputs = self._run(request, box, model, record, prompt.media)
        job = serve.PreparedRequest(services, record, model, generates)
        if request.background:
            asked = _asked(run, job, inputs, box, request.includes(SEALED))
            await self._start(run, job, asked, stream, scope, receive, send)
            return
        if not stream:
            await job.whole(ResponseFold(run), receive, send)
            return
        self._running[run.response.id] = (tenant_of(record), run)
        try:
            await job.stream(ResponseStream(run), receive, send)
        finally:
            del self._running[run.response.id]

    async def _start(
        self,
        run: ResponseRun,
        job: serve.PreparedRequest,
        asked: JournaledRequest,
        stream: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Begin a background response, and answer with it as it is then, or with its events."""
        record = job.record
        if not self._history.is_on:
            raise BadRequest("'background' needs [server] response_store, which is off.", "background")
        background = self._backgrounds.start(run, job, tenant_of(record), asked)
        try:
            if stream:
                await self._retrieval.send_events(background, -1, scope, receive, send)
            else:
                await self._retrieval.send_state(run, run.snapshot(), record, send, record.headers)
        except ApiError:
            # There was no room for the answer: its client does not know it, and asks again.
            await self._backgrounds.forget(background)
            raise

    def _run(
        self, request: ResponsesRequest, box: Toolbox, model: ModelConfig, record: RequestRecord, media: Sequence[Media]
    ) -> tuple[ResponseRun, list[InputItem]]:
        """The response, and its input items as they are kept."""
        stem = secrets.token_hex(20)
        is_stored = self._history.is_on and request.store is not False
        response = echo(request, box, model, id_of(stem), serve.now(), is_stored)
        inputs = numbered(with_stored_media(request.items, media), stem)
        own = {each.digest: each.data for each in media if is_stored and each.param.startswith(OWN_MEDIA)}
        size = record.body_bytes - record.encoded_bytes + sum(map(len, own.values()))
        keep = self._history.keeper(tenant_of(record), inputs, own, size) if is_stored else keep_nothing
        output = ResponseOutput(stem, box.forms, request.includes(SEALED))
        stop = partial(self._services.link.stop, reason="cancelled")
        return ResponseRun(response, output, serve.now, keep, stop, record.body_bytes), inputs


def _asked(
    run: ResponseRun, job: serve.PreparedRequest, inputs: list[InputItem], box: Toolbox, is_sealed: bool
) -> JournaledRequest:
    record, model, generate = job.record, job.model, job.generates[0]
    return JournaledRequest(
        key=record.caller.key,
        model=model.full_name,
        path=model.root,
        request_id=record.id,
        response=run.response,
        generate=generate,
        inputs=inputs,
        forms=box.forms,
        is_sealed=is_sealed,
        body_bytes=record.body_bytes,
        began=time.time() - (time.perf_counter() - record.started),
        limit_s=generate.deadline_ms / 1000,
        is_everybodys=record.caller.is_anonymous,
    )


def _lowering(
    services: Services, request: ResponsesRequest, prompt: ChatPrompt, model: ModelConfig, seed: int
) -> Callable[[], Generate]:
    deadline_ms = serve.deadline_ms(services)
    return lambda: lower_responses(request, prompt, model, services.link.next_rid, seed, deadline_ms)


class CountInputTokens:
    """An ASGI endpoint."""

    def __init__(self, services: Services, history: ResponseHistory) -> None:
        self._services = services
        self._history = history

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_count)
        request = msgspec.structs.replace(request, input=await self._history.resolved(record, request.items))
        before = await self._history.before(record, request.previous_response_id)
        box = toolbox(request)
        prompt, left_out = await services.bodies.work(record.body_bytes, lower_prompt, request, box, before)
        model, _ = serve.begin(services, record, request.model, False, None, [*ignored, *left_out])
        prompt = await serve.with_media(services, record, model, prompt, self._history.media(record))
        prompt = with_thinking(prompt, lower_thinking(request, model.thinking))
        async with cut_off(record, receive):
            tokenized = await serve.tokenize(services, record, model, prompt)
            await send_body(send, 200, _encode(out.InputTokenCount(tokenized.count)), record.headers)


class One:
    """An ASGI endpoint: retrieve, delete and cancel. What runs can be seen and cancelled by those who know its id."""

    def __init__(
        self, history: ResponseHistory, running: Running, backgrounds: Backgrounds, retrieval: Retrieval
    ) -> None:
        self._history = history
        self._running = running
        self._backgrounds = backgrounds
        self._retrieval = retrieval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        tenant, response_id = tenant_of(record), _path_id(scope)
        background = self._backgrounds.find(tenant, response_id)
        run = self._run(tenant, response_id) if background is None else background.run
        match scope["method"]:
            case "DELETE":
                if background is not None:
                    await self._backgrounds.forget(background)
                await self._history.delete(tenant, response_id)
                await send_body(send, 200, _encode(out.DeletedResponse(response_id)))
            case "POST" if run is not None:
                state = run.cancel() if background is None else background.cancel()
                await self._retrieval.send_state(run, state, record, send)
            case "POST":
                # One that has ended already is answered as it is.
                await self._retrieval.send_stored(response_id, record, send)
            case _:
                after = _starting_after(_query(scope))
                if after is not None:
                    events = background or await self._without_events(run, tenant, response_id)
                    await self._retrieval.send_events(events, after, scope, receive, send)
                elif run is not None:
                    await self._retrieval.send_state(run, run.snapshot(), record, send)
                else:
                    await self._retrieval.send_stored(response_id, record, send)

    def _run(self, tenant: str, response_id: str) -> ResponseRun | None:
        owner, run = self._running.get(response_id, (tenant, None))
        return run if owner == tenant else None

    async def _without_events(self, run: ResponseRun | None, tenant: str, response_id: str) -> NoReturn:
        """Raises `BadRequest`, or `ResponseNotFound` where there is no response at all."""
        if run is None:
            await self._history.sizes(tenant, response_id)
        raise BadRequest(GONE, "stream", "events_gone")


class InputItems:
    """An ASGI endpoint: what the model was given, the conversation before included, a page at a time."""

    def __init__(self, retrieval: Retrieval) -> None:
        self._retrieval = retrieval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = _query(scope)
        await self._retrieval.send_items(_path_id(scope), query, _limit(query), record_of(scope), send)


def _starting_after(query: QueryParams) -> int | None:
    """Number of the client's last event, -1 for none; None where no stream is wanted. Raises `BadRequest`."""
    given = query.get("starting_after")
    if query.get("stream", "").lower() != "true":
        if given is not None:
            raise BadRequest("'starting_after' is for 'stream'.", "starting_after", "invalid_value")
        return None
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= NUMBER_DIGITS):
        raise BadRequest("Invalid value for 'starting_after': expected a number.", "starting_after", "invalid_value")
    return int(given)


def _limit(query: QueryParams) -> int:
    """Items in a page. Raises `BadRequest`."""
    given = query.get("limit", str(ITEMS_DEFAULT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= len(str(ITEMS_MAX)) else 0
    if not 1 <= limit <= ITEMS_MAX:
        raise BadRequest(f"Invalid value for 'limit': expected 1 to {ITEMS_MAX}.", "limit", "invalid_value")
    return limit


def _path_id(scope: Scope) -> str:
    response_id = scope["path_params"]["id"]
    assert isinstance(response_id, str)
    return response_id


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])
