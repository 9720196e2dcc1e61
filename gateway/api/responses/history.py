"""History of a response: those kept before it, and the items in them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.api.openai.request import AudioData
from gateway.api.responses import response as out
from gateway.api.responses.lowering import FOREIGN_ITEMS, unseal
from gateway.api.responses.request import ContentPart, InputItem
from gateway.api.responses.store import Store, StoreBroken, StoredResponse, StoredSizes, TooMuchSaid
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.http.exchange import reserve
from gateway.media.reference import stored_url
from gateway.request.record import RequestRecord
from protocol.codec import MAX_FRAME_BYTES
from protocol.prompts import Media

# Of the conversation before a request, in all.
ITEMS_MAX: Final = 20_000

# Path of the media that a request's own input has, not the conversation before it.
OWN_MEDIA: Final = "input["
_RESPONSE: Final = "resp_"
_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class _Status(Struct, frozen=True):
    status: str = ""


class _Output(Struct, frozen=True):
    output: list[InputItem]
    status: str = ""


# Kept with one of these, a response has not ended; without a task that generates it, it never will.
UNENDED: Final = frozenset({"queued", "in_progress"})

_encode = msgspec.json.Encoder().encode
_status = msgspec.json.Decoder(_Status)
_output = msgspec.json.Decoder(_Output)
_items = msgspec.json.Decoder(list[InputItem])


class ResponseNotFound(ApiError):
    def __init__(self, response_id: str) -> None:
        super().__init__(404, f"Response with id {response_id[:100]!r} not found.", code="response_not_found")


def numbered(items: Sequence[InputItem], stem: str) -> list[InputItem]:
    """Input items as they are listed: each with an id, the client's or one of ours.

    Of what no model here is ever shown, that it was there is all that is listed.
    """
    return [
        msgspec.structs.replace(
            _bare(item) if item.kind in FOREIGN_ITEMS and unseal(item.encrypted_content) is None else item,
            type=item.kind,
            id=item.id or f"{_PREFIXES.get(item.kind, 'item')}_{stem}i{index:04x}",
        )
        for index, item in enumerate(items)
    ]


def _bare(item: InputItem) -> InputItem:
    return InputItem(status=item.status, call_id=item.call_id)


def with_stored_media(items: Sequence[InputItem], media: Sequence[Media]) -> list[InputItem]:
    """Input items, their media by digest in place of their bytes."""
    digests = {each.param: each.digest for each in media}
    if not digests:
        return list(items)
    return [_stored_media(item, f"input[{index}]", digests) for index, item in enumerate(items)]


def _stored_media(item: InputItem, where: str, digests: dict[str, bytes]) -> InputItem:
    def kept(parts: str | list[ContentPart] | None, name: str) -> str | list[ContentPart] | None:
        if not isinstance(parts, list):
            return parts
        return [_by_digest(part, digests.get(f"{where}.{name}[{at}]")) for at, part in enumerate(parts)]

    return msgspec.structs.replace(item, content=kept(item.content, "content"), output=kept(item.output, "output"))


def _by_digest(part: ContentPart, digest: bytes | None) -> ContentPart:
    if digest is None:
        return part
    url = stored_url(digest)
    match part.type:
        case "input_image":
            return msgspec.structs.replace(part, image_url=url)
        case "input_video":
            return msgspec.structs.replace(part, video_url=url)
        case _:
            return msgspec.structs.replace(part, input_audio=AudioData(url))


class ResponseHistory:
    """The store, in the terms of this API. Everything raises `ApiError`.

    `limit_bytes` bounds what one request may have read again: a conversation is no larger than a body. What is
    decoded is decoded in the store's thread.
    """

    def __init__(self, store: Store, limit_bytes: Callable[[], int], is_running: Callable[[str], bool]) -> None:
        """`is_running` is whether a response of this id is being generated now."""
        self._store = store
        self._is_running = is_running
        self._limit_bytes = limit_bytes

    @property
    def is_on(self) -> bool:
        return self._store.is_on

    def keep(
        self,
        tenant: str,
        last: out.Response,
        inputs: Sequence[InputItem],
        media: Mapping[bytes, bytes],
        about_bytes: int,
    ) -> None:
        """Keep a response that has ended, with the bytes of the media that its input has by digest."""

        def make() -> StoredResponse:
            ids = [item.id for item in (*inputs, *last.output) if item.id]
            sent = _encode(inputs)
            said_bytes = len(sent) + len(_encode(last.output))
            return StoredResponse(
                last.id, tenant, last.previous_response_id, _encode(last), sent, ids, said_bytes, media
            )

        self._store.keep(about_bytes, make)

    def keeper(
        self, tenant: str, inputs: Sequence[InputItem], media: Mapping[bytes, bytes], about_bytes: int
    ) -> Callable[[out.Response], None]:
        """`keep` of one response, for each of its states."""
        return lambda last: self.keep(tenant, last, inputs, media, about_bytes)

    def media(self, record: RequestRecord) -> Callable[[Sequence[bytes]], Awaitable[dict[bytes, bytes]]]:
        """Bytes of media that earlier responses of the request's tenant have kept. Raises `ApiError`."""

        async def kept(digests: Sequence[bytes]) -> dict[bytes, bytes]:
            try:
                return await self._store.media(tenant_of(record), digests, MAX_FRAME_BYTES)
            except StoreBroken:
                raise _broken() from None
            except TooMuchSaid:
                message = f"The media of the conversation are larger than {MAX_FRAME_BYTES} bytes."
                raise BadRequest(message, "previous_response_id", "conversation_too_large") from None

        return kept

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises `ResponseNotFound`."""
        try:
            stored = await self._store.get(tenant, response_id)
        except StoreBroken:
            raise _broken() from None
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def sizes(self, tenant: str, response_id: str) -> StoredSizes:
        """Sizes of a response. Raises `ResponseNotFound`."""
        try:
            sizes = await self._store.sizes(tenant, response_id)
        except StoreBroken:
            raise _broken() from None
        if sizes is None:
            raise ResponseNotFound(response_id)
        return sizes

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises `ResponseNotFound`."""
        try:
            is_found = await self._store.delete(tenant, response_id)
        except StoreBroken:
            raise _broken() from None
        if not is_found:
            raise ResponseNotFound(response_id)

    async def before(self, record: RequestRecord, previous: str | None) -> list[InputItem]:
        """The conversation up to a response, its output included.

        Raises `BadRequest` when a part of it is gone, when it has failed, or is too large with the request's body.
        """
        if previous is None:
            return []
        room = self._limit_bytes() - record.body_bytes
        try:
            conversation = await self._store.conversation(tenant_of(record), previous, room, _turns)
        except StoreBroken:
            raise _broken() from None
        except TooMuchSaid:
            raise self._too_large("previous_response_id") from None
        except NotContinued as error:
            # Kept as running by a daemon that has ended, it never will end.
            has_failed = error.status == "failed" or not self._is_running(previous)
            what, code = ("failed", "failed") if has_failed else ("not ended", "not_ended")
            message = f"Response {previous[:100]!r} has {what}: a conversation cannot go on from it."
            raise BadRequest(message, "previous_response_id", f"previous_response_{code}") from None
        if conversation is None:
            message = f"Previous response with id {previous[:100]!r} not found, or one before it is gone."
            raise BadRequest(message, "previous_response_id", "previous_response_not_found")
        size, items = conversation
        if len(items) > ITEMS_MAX:
            message = f"The conversation before has {len(items)} items; at most {ITEMS_MAX} can be continued."
            raise BadRequest(message, "previous_response_id", "conversation_too_long")
        await _note(record, size)
        return items

    async def resolved(self, record: RequestRecord, items: Sequence[InputItem]) -> list[InputItem]:
        """The items, each reference replaced by what it refers to. What is not found stays."""
        references = [item.id for item in items if item.id and item.kind == "item_reference"]
        if not references:
            return list(items)
        room = self._limit_bytes() - record.body_bytes
        try:
            owners = await self._store.owners(tenant_of(record), references, room, _all_items)
        except StoreBroken:
            raise _broken() from None
        except TooMuchSaid:
            raise self._too_large("input") from None
        owned = {item.id: item for item in owners}
        # The same item may be referred to many times.
        sizes = {item_id: len(_encode(owned[item_id])) for item_id in dict.fromkeys(references) if item_id in owned}
        size = sum(sizes.get(item_id, 0) for item_id in references)
        if size > room:
            raise self._too_large("input")
        await _note(record, size)
        return [owned.get(item.id, item) if item.kind == "item_reference" else item for item in items]

    def has_ended(self, stored: StoredResponse) -> bool:
        """Whether its generation had ended when it was kept."""
        return _status.decode(stored.body).status not in UNENDED

    def inputs(self, stored: StoredResponse) -> list[InputItem]:
        """The client's input of a response."""
        return _items.decode(stored.inputs)

    def _too_large(self, param: str) -> BadRequest:
        message = f"The request and the conversation that it continues are larger than {self._limit_bytes()} bytes."
        return BadRequest(message, param, "conversation_too_large")


def id_of(stem: str) -> str:
    """The id of the response whose items have ids of this stem."""
    return f"{_RESPONSE}{stem}"


def stem_of(response: out.Response) -> str:
    """The stem of its items' ids."""
    return response.id.removeprefix(_RESPONSE)


class NotContinued(Exception):
    """A response that has failed, or not ended, says nothing that a conversation could go on from."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


def tenant_of(record: RequestRecord) -> str:
    """The tenant that owns the responses stored for this request."""
    return record.caller.key or ""


def _turns(stored: StoredResponse) -> list[InputItem]:
    """Items with which a conversation continues. Runs in the store's thread."""
    answer = _output.decode(stored.body)
    if answer.status == "failed" or answer.status in UNENDED:
        raise NotContinued(answer.status)
    return [*_items.decode(stored.inputs), *answer.output]


def _all_items(stored: StoredResponse) -> list[InputItem]:
    """Items that a request can refer to. Runs in the store's thread."""
    return [*_items.decode(stored.inputs), *_output.decode(stored.body).output]


async def _note(record: RequestRecord, size_bytes: int) -> None:
    """Count stored items that are read again as part of the request's body."""
    record.body_bytes += size_bytes
    await reserve(record, record.body_bytes)


def _broken() -> Unavailable:
    return Unavailable("Kept responses cannot be read now.", code="store_unavailable")
