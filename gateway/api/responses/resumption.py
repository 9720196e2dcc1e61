"""Resumption of the background responses that an earlier daemon left. It happens when this daemon starts."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from gateway.api.common import serve
from gateway.api.responses.background import Background, Backgrounds
from gateway.api.responses.encoder import ResponseRun, large_bytes, with_large_encoded
from gateway.api.responses.history import ResponseHistory, ResponseNotFound, has_ended, stem_of
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.journal import (
    LOST_BEGIN,
    BeginRecord,
    ContentRecord,
    DeltaRecord,
    JournaledRequest,
    NotUnderstood,
    ResponseJournals,
    ShutdownRecord,
    StartRecord,
)
from gateway.api.responses.journal import Record as JournalRecord
from gateway.errors import ApiError, Unauthorized, Unavailable
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord
from gateway.services import Services
from protocol.codec import pack
from protocol.to_worker import ChatPrompt, Generate

PATH: Final = "/v1/responses"
log = logging.getLogger(__name__)

# If this many consecutive daemons ended without generating a token of a response, the response may be the cause.
FRUITLESS_DAEMONS_MAX: Final = 5
# A store that cannot be read is asked again this often, and with this delay.
STORE_TRIES: Final = 3
STORE_RETRY_S: Final = 0.3
# If the journal may have lost events that clients received, this many event numbers are skipped. It cannot have lost
# more.
LOST_EVENTS_MAX: Final = 1 << 24


@dataclass(slots=True)
class ReplayedResponse:
    """Result of replaying a journal.

    `token_ids` are the tokens so far. `fruitless` is the number of daemons that have begun since the newest journaled
    tokens, including this one. `truncated` has the numbers of turns and of tokens that were left out of the prompt.
    """

    token_ids: list[int] = field(default_factory=list[int])
    fruitless: int = 0
    truncated: tuple[int, int] = (0, 0)

    def rest_of(self, generate: Generate, rid: int, deadline_ms: int) -> Generate:
        """Return the request for the tokens that are still missing."""
        is_cut = generate.truncate != 0 and len(self.token_ids) > 0
        return msgspec.structs.replace(
            generate,
            rid=rid,
            resume=tuple(self.token_ids),
            truncated=self.truncated if is_cut else None,
            deadline_ms=deadline_ms,
        )


class Resumption:
    """Resumes the response of each journal, once, before the daemon serves requests."""

    def __init__(
        self,
        services: Services,
        history: ResponseHistory,
        journals: ResponseJournals,
        backgrounds: Backgrounds,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._services = services
        self._wall = wall
        self._history = history
        self._journals = journals
        self._backgrounds = backgrounds

    async def run(self) -> None:
        """Start all responses. A response that fails does not affect the others."""
        for path in await self._journals.paths():
            try:
                await self._resume(path)
            except Exception:  # An error must not affect the responses of other files.
                self._services.metrics.unhandled_errors += 1
                log.exception("journal %s: its response does not go on", path.name)

    async def _resume(self, path: Path) -> None:
        content = await self._content(path)
        is_revoked = content is not None and content.request.tenant not in self._services.keyring.owners
        if content is None or is_revoked or await self._has_ended(content.request):
            await self._journals.discard(path)
            return
        work = self._services.bodies.work
        response = await work(content.whole_bytes, with_large_encoded, content.request.response)
        request = msgspec.structs.replace(content.request, response=response)
        background = Background(request.tenant, self._run(request), self._backgrounds.stored)
        records = [*(content.records or [LOST_BEGIN]), BeginRecord(self._journals.boot_id())]
        replayed = await work(content.whole_bytes, replay, background, records)
        background.journal = self._journals.reopen(path, content, background.events.add)
        log.info("background response %s goes on after %d tokens", background.id, len(replayed.token_ids))
        is_whole = background.run.output.finish is not None
        task = self._end(background) if is_whole else self._continue(background, request, replayed)
        self._backgrounds.register(background, task)

    async def _content(self, path: Path) -> ContentRecord | None:
        if not self._journals.is_on:
            return None
        try:
            return await self._journals.read(path)
        except (NotUnderstood, OSError) as error:
            log.error("journal %s: its response does not go on: %s", path.name, error)
            return None

    async def _has_ended(self, request: JournaledRequest) -> bool:
        """Whether the response is stored as ended. If its daemon was killed, it may not be stored at all."""
        for _ in range(STORE_TRIES):
            try:
                return has_ended(await self._history.get(request.tenant, request.response.id))
            except ResponseNotFound:
                return False
            except Unavailable:
                await asyncio.sleep(STORE_RETRY_S)
        # The client knows the id, so the response goes on.
        return False

    def _run(self, request: JournaledRequest) -> ResponseRun:
        prompt, response = request.generate.prompt, request.response
        media = prompt.media if isinstance(prompt, ChatPrompt) else ()
        keep = self._history.keeper(request.tenant, request.inputs, media, request.body_bytes)
        output = ResponseOutput(stem_of(response), request.forms, request.is_sealed)
        stop = partial(self._services.link.stop, reason="cancelled")
        return ResponseRun(response, output, serve.now, keep, stop, request.body_bytes)

    async def _end(self, background: Background, error: ApiError | None = None) -> None:
        await (background.complete() if error is None else background.fail(error))
        await self._backgrounds.end(background)

    async def _continue(self, background: Background, request: JournaledRequest, replayed: ReplayedResponse) -> None:
        with ExitStack() as held:
            try:
                generation = await self._enter(background, request, replayed, held)
            except ApiError as error:
                log.warning("background response %s does not go on: %s", background.id, error.message)
                await self._end(background, error)
                return
            leases = held.pop_all()
        await self._backgrounds.run(background, generation, leases)

    async def _enter(
        self, background: Background, request: JournaledRequest, replayed: ReplayedResponse, held: ExitStack
    ) -> Generation:
        """Start the generation of the response, which is admitted like any request. Raises `ApiError`."""
        services = self._services
        if replayed.fruitless > FRUITLESS_DAEMONS_MAX:
            raise Unavailable("The server was restarted too often while it was generating this response.")
        if request.is_everybodys and not services.keyring.is_open:
            raise Unauthorized("This response was asked for without an API key, and there are keys by now.", None)
        caller = services.keyring.named(request.key, request.tenant)
        if caller is None:
            raise Unauthorized("The API key that asked for this response is no longer in force.", None)
        model = services.live.router.resolve(request.model, caller)
        if model.root != request.path:
            raise Unavailable(f"The model {model.name!r} has other weights than when this response was begun.")
        lease, media_lease = services.bodies.lease(), services.media.lease()
        held.callback(lease.close)
        held.callback(media_lease.close)
        clock = services.clock
        record = RequestRecord(request.request_id, "POST", PATH, caller=caller, model=model.name, stream=True)
        record.started, record.clock = clock(), clock
        record.lease, record.media_lease, record.body_bytes = lease, media_lease, request.body_bytes
        lease.owner = media_lease.owner = caller.key or ""
        echo_bytes = min(large_bytes(request.response), services.bodies.largest_bytes())
        await lease.reach(max(request.body_bytes, echo_bytes))
        prompt = request.generate.prompt
        if isinstance(prompt, ChatPrompt) and prompt.media:
            media_lease.grow(sum(len(each.data) for each in prompt.media))
            record.media = tuple(msgspec.structs.replace(each, data=b"") for each in prompt.media)
            record.media_bytes = media_lease.size_bytes
        left_ms = int((request.began + request.limit_s - self._wall()) * 1000)
        deadline_ms = max(1, left_ms) if request.limit_s else 0
        generate = replayed.rest_of(request.generate, services.link.next_rid(), deadline_ms)
        packed = await services.bodies.work(record.body_bytes + record.media_bytes, pack, [generate])
        background.check()
        return held.enter_context(Generation(services, model, packed, record, background.run.bind))


def replay(background: Background, records: list[JournalRecord]) -> ReplayedResponse:
    """Replay a journal: restore the response's events with their numbers. May run in any thread."""
    encoder, events = background.encoder, background.events
    events.add(encoder.queued())
    replayed = ReplayedResponse()
    boot: str | None = None
    is_certain = True
    for record in records:
        match record:
            case BeginRecord():
                # A power cut may have removed events from the disk that clients received.
                if boot is not None and not is_certain and not (boot and record.boot == boot):
                    events.skip(encoder.skip(LOST_EVENTS_MAX))
                boot = record.boot
                replayed.fruitless += 1
            case StartRecord():
                events.add(encoder.started())
            case DeltaRecord(deltas, truncated):
                events.add(encoder.encode(deltas))
                replayed.token_ids += [token for delta in deltas for token in delta.token_ids]
                replayed.truncated, replayed.fruitless = truncated, 0
            case ShutdownRecord():
                pass
        is_certain = isinstance(record, ShutdownRecord)
    return replayed
