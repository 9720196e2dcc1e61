"""Answers with responses and their input items. Each answer is encoded once for all clients that read it."""

from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.responses import response as out
from gateway.api.responses.background import Background, failed_by_restart
from gateway.api.responses.encoder import ResponseRun
from gateway.api.responses.history import ResponseHistory, has_ended, inputs_of
from gateway.api.responses.request import InputItem
from gateway.api.responses.response_database import StoredResponse
from gateway.errors import BadRequest
from gateway.http.exchange import send_body
from gateway.http.request_body import reserve
from gateway.http.shared_answers import SharedAnswers
from gateway.request.record import Header, RequestRecord, record_of
from gateway.services import Services

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
        write_timeout_s = self._services.config.server.write_timeout_s
        # Readers may keep the fields in memory after the response was dropped.
        async with self._answers.reading(record, (background.id, "echo"), events.echo_bytes, _no_copy):
            await background.answer(after, scope, receive, send, write_timeout_s)

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
