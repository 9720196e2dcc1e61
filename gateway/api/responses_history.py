"""What came before a response: kept ones, and the items in them."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.schemas import responses_out as out
from gateway.schemas.responses import Item
from gateway.store import Store, StoreBroken, Stored

_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class _Output(Struct, frozen=True):
    output: list[Item]


_encode = msgspec.json.Encoder().encode
_output = msgspec.json.Decoder(_Output)
_items = msgspec.json.Decoder(list[Item])


class ResponseNotFound(ApiError):
    def __init__(self, response_id: str) -> None:
        super().__init__(404, f"Response with id {response_id[:100]!r} not found.", code="response_not_found")


def numbered(items: Sequence[Item], stem: str) -> list[Item]:
    """Input items as they are listed: each with an id, the client's or one of ours."""
    return [
        msgspec.structs.replace(
            item, type=item.kind, id=item.id or f"{_PREFIXES.get(item.kind, 'item')}_{stem}i{index:04x}"
        )
        for index, item in enumerate(items)
    ]


class History:
    """The store, in the terms of this API. Everything raises `ApiError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def is_on(self) -> bool:
        return self._store.is_on

    def keep(self, tenant: str, last: out.Response, inputs: Sequence[Item]) -> None:
        """Keep a response that has ended."""
        ids = [item.id for item in (*inputs, *last.output) if item.id]
        stored = Stored(last.id, tenant, last.previous_response_id, _encode(last), _encode(inputs), ids)
        self._store.keep(stored)

    async def get(self, tenant: str, response_id: str) -> Stored:
        """Raises `ResponseNotFound`."""
        try:
            stored = await self._store.get(tenant, response_id)
        except StoreBroken:
            raise _broken() from None
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises `ResponseNotFound`."""
        try:
            is_found = await self._store.delete(tenant, response_id)
        except StoreBroken:
            raise _broken() from None
        if not is_found:
            raise ResponseNotFound(response_id)

    async def before(self, tenant: str, previous: str | None) -> list[Item]:
        """The conversation up to a response, its output included. Raises `BadRequest` when a part of it is gone."""
        if previous is None:
            return []
        try:
            conversation = await self._store.conversation(tenant, previous)
        except StoreBroken:
            raise _broken() from None
        if conversation is None:
            message = f"Previous response with id {previous[:100]!r} not found, or one before it is gone."
            raise BadRequest(message, "previous_response_id", "previous_response_not_found")
        return [item for stored in conversation for item in (*self.inputs(stored), *_output.decode(stored.body).output)]

    async def resolved(self, tenant: str, items: Sequence[Item]) -> list[Item]:
        """The items, each reference replaced by what it refers to. What is not found stays."""
        return [
            await self._referred(tenant, item) if item.kind == "item_reference" and item.id else item for item in items
        ]

    def inputs(self, stored: Stored) -> list[Item]:
        """What the client had sent for a response."""
        return _items.decode(stored.inputs)

    async def _referred(self, tenant: str, reference: Item) -> Item:
        try:
            stored = await self._store.owner(tenant, reference.id or "")
        except StoreBroken:
            raise _broken() from None
        if stored is None:
            return reference
        found = [*self.inputs(stored), *_output.decode(stored.body).output]
        return next((item for item in found if item.id == reference.id), reference)


def _broken() -> Unavailable:
    return Unavailable("Kept responses cannot be read now.", code="store_unavailable")
