"""History of a response: the stored responses that it continues, and their items."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Struct

from gateway.api.common.canonical import arguments_text
from gateway.api.openai.request import AudioData
from gateway.api.responses import response as out
from gateway.api.responses.lowering import FOREIGN_ITEMS, unseal
from gateway.api.responses.request import ContentPart, InputItem
from gateway.api.responses.store import (
    ResponseDatabase,
    Store,
    StoreBroken,
    StoredResponse,
    StoredSizes,
    StoredTooLarge,
)
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.http.bodies import reserve
from gateway.media.media_reference import stored_url
from gateway.request.record import RequestRecord
from protocol.codec import MAX_FRAME_BYTES
from protocol.to_worker import Media

T = TypeVar("T")

CONVERSATION_ITEMS_MAX: Final = 20_000

# The `param` of media in the request's own input begins with this; that of media in the earlier conversation does not.
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


# A response stored with one of these statuses is being generated, or was interrupted when its daemon ended.
UNENDED: Final = frozenset({"queued", "in_progress"})

_encode = msgspec.json.Encoder().encode
_status = msgspec.json.Decoder(_Status)
_output = msgspec.json.Decoder(_Output)
_items = msgspec.json.Decoder(list[InputItem])


class ResponseNotFound(ApiError):
    def __init__(self, response_id: str) -> None:
        super().__init__(404, f"Response with id {response_id[:100]!r} not found.", code="response_not_found")


def numbered(items: Sequence[InputItem], stem: str) -> list[InputItem]:
    """Return input items as they are listed. Each has the client's id, or an id that is made here from `stem`.

    Items that no model here ever sees are listed without their content, and arguments are listed as text.
    """
    return [
        msgspec.structs.replace(
            _listed(item),
            type=item.kind,
            id=item.id or f"{_PREFIXES.get(item.kind, 'item')}_{stem}i{index:04x}",
        )
        for index, item in enumerate(items)
    ]


def _listed(item: InputItem) -> InputItem:
    if item.kind in FOREIGN_ITEMS and unseal(item.encrypted_content) is None:
        return InputItem(status=item.status, call_id=item.call_id)
    if isinstance(item.arguments, dict):
        return msgspec.structs.replace(item, arguments=arguments_text(item.arguments))
    return item if item.summary is not None else msgspec.structs.replace(item, summary=UNSET)


def with_stored_media(items: Sequence[InputItem], media: Sequence[Media]) -> list[InputItem]:
    """Return input items with their media replaced by references to the stored bytes."""
    digests = {each.param: each.digest for each in media}
    if not digests:
        return list(items)
    return [_stored_media(item, f"input[{index}]", digests) for index, item in enumerate(items)]


def _stored_media(item: InputItem, where: str, digests: dict[str, bytes]) -> InputItem:
    def replaced(parts: str | list[ContentPart] | None, name: str) -> str | list[ContentPart] | None:
        if not isinstance(parts, list):
            return parts
        return [_by_digest(part, digests.get(f"{where}.{name}[{at}]")) for at, part in enumerate(parts)]

    return msgspec.structs.replace(
        item, content=replaced(item.content, "content"), output=replaced(item.output, "output")
    )


def _by_digest(part: ContentPart, digest: bytes | None) -> ContentPart:
    if digest is None:
        return part
    url = stored_url(digest)
    match part.type:
        case "input_image":
            return msgspec.structs.replace(part, image_url=url)
        case "input_video":
            return msgspec.structs.replace(part, video_url=url)
        case "input_file":
            return msgspec.structs.replace(part, file_data=url, file_url=None)
        case _:
            return msgspec.structs.replace(part, input_audio=AudioData(url))


class ResponseHistory:
    """Access to the store for this API. Methods raise `ApiError`.

    `limit_bytes` is the maximum size of the stored items that one request may read, because a conversation may be no
    larger than a body. Stored JSON is decoded in the store's thread.
    """

    def __init__(self, store: Store, limit_bytes: Callable[[], int], is_running: Callable[[str], bool]) -> None:
        """`is_running` returns whether a response with this id is being generated now."""
        self._store = store
        self._is_running = is_running
        self._limit_bytes = limit_bytes

    @property
    def is_on(self) -> bool:
        return self._store.is_on

    def keeper(
        self, tenant: str, inputs: Sequence[InputItem], media: Sequence[Media], about_bytes: int
    ) -> Callable[[out.Response], Future[bool]]:
        """Return a function that stores a state of the response, together with its input items and their media.

        Its result is whether the state was stored.
        """
        own = {each.digest: each.data for each in media if each.param.startswith(OWN_MEDIA)}
        size = about_bytes + sum(map(len, own.values()))

        def keep(response: out.Response) -> Future[bool]:
            def make() -> StoredResponse:
                ids = [item.id for item in (*inputs, *response.output) if item.id]
                sent = _encode(inputs)
                items_bytes = len(sent) + len(_encode(response.output))
                previous, body = response.previous_response_id, _encode(response)
                return StoredResponse(response.id, tenant, previous, body, sent, ids, items_bytes, own)

            return self._store.keep(size, make)

        return keep

    def media(self, record: RequestRecord) -> Callable[[Sequence[bytes]], Awaitable[dict[bytes, bytes]]]:
        """Return a function that loads the tenant's stored media by digest. That function raises `ApiError`."""

        async def load(digests: Sequence[bytes]) -> dict[bytes, bytes]:
            try:
                return await self._read(lambda database: database.media(record.caller.owner, digests, MAX_FRAME_BYTES))
            except StoredTooLarge:
                message = f"The media of the conversation are larger than {MAX_FRAME_BYTES} bytes."
                raise BadRequest(message, "previous_response_id", "conversation_too_large") from None

        return load

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Return a stored response. Raises `ResponseNotFound`."""
        stored = await self._read(lambda database: database.get(tenant, response_id))
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def sizes(self, tenant: str, response_id: str) -> StoredSizes:
        """Return the sizes of a stored response. Raises `ResponseNotFound`."""
        sizes = await self._read(lambda database: database.sizes(tenant, response_id))
        if sizes is None:
            raise ResponseNotFound(response_id)
        return sizes

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a stored response. Raises `ResponseNotFound`."""
        if not await self._read(lambda database: database.delete(tenant, response_id)):
            raise ResponseNotFound(response_id)

    async def before(self, record: RequestRecord, previous: str | None) -> list[InputItem]:
        """Return the conversation up to and including a response.

        Raises `BadRequest` if a part of it is gone, has failed, or is too large together with the request's body.
        """
        if previous is None:
            return []
        tenant, room = record.caller.owner, self._limit_bytes() - record.body_bytes
        try:
            conversation = await self._read(lambda database: database.conversation(tenant, previous, room, _turns))
        except StoredTooLarge:
            raise self._too_large("previous_response_id") from None
        except NotContinued as error:
            # A response that is stored as running has failed if no task generates it any more.
            has_failed = error.status == "failed" or not self._is_running(previous)
            what, code = ("failed", "failed") if has_failed else ("not ended", "not_ended")
            message = f"Response {previous[:100]!r} has {what}: a conversation cannot go on from it."
            raise BadRequest(message, "previous_response_id", f"previous_response_{code}") from None
        if conversation is None:
            message = f"Previous response with id {previous[:100]!r} not found, or one before it is gone."
            raise BadRequest(message, "previous_response_id", "previous_response_not_found")
        return await self.admitted(record, *conversation)

    async def admitted(self, record: RequestRecord, size: int, items: list[InputItem]) -> list[InputItem]:
        """Return a conversation of this size, with memory reserved for it. Raises `BadRequest` if it is too large."""
        if size > self._limit_bytes() - record.body_bytes:
            raise self._too_large("previous_response_id")
        if len(items) > CONVERSATION_ITEMS_MAX:
            message = (
                f"The conversation before has {len(items)} items; at most {CONVERSATION_ITEMS_MAX} can be continued."
            )
            raise BadRequest(message, "previous_response_id", "conversation_too_long")
        await _reserve_more(record, size)
        return items

    async def resolved(self, record: RequestRecord, items: Sequence[InputItem]) -> list[InputItem]:
        """Replace each reference by the item that it names. References to unknown items stay."""
        references = [item.id for item in items if item.id and item.kind == "item_reference"]
        if not references:
            return list(items)
        tenant, room = record.caller.owner, self._limit_bytes() - record.body_bytes
        try:
            owners = await self._read(lambda database: database.owners(tenant, references, room, _all_items))
        except StoredTooLarge:
            raise self._too_large("input") from None
        owned = {item.id: item for item in owners}
        # An item is counted once for each reference to it.
        sizes = {item_id: len(_encode(owned[item_id])) for item_id in dict.fromkeys(references) if item_id in owned}
        size = sum(sizes.get(item_id, 0) for item_id in references)
        if size > room:
            raise self._too_large("input")
        await _reserve_more(record, size)
        return [owned.get(item.id, item) if item.kind == "item_reference" else item for item in items]

    async def _read(self, action: Callable[[ResponseDatabase], T]) -> T:
        try:
            return await self._store.read(action)
        except StoreBroken:
            raise Unavailable("Kept responses cannot be read now.", code="store_unavailable") from None

    def _too_large(self, param: str) -> BadRequest:
        message = f"The request and the conversation that it continues are larger than {self._limit_bytes()} bytes."
        return BadRequest(message, param, "conversation_too_large")


class NotContinued(Exception):
    """Raised for a conversation that continues a response which has failed or not ended."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


def id_of(stem: str) -> str:
    """Return the id of the response whose item ids contain this stem."""
    return f"{_RESPONSE}{stem}"


def stem_of(response: out.Response) -> str:
    """Return the stem of the item ids of this response."""
    return response.id.removeprefix(_RESPONSE)


def has_ended(stored: StoredResponse) -> bool:
    """Whether the response had ended when it was stored."""
    return _status.decode(stored.body).status not in UNENDED


def inputs_of(stored: StoredResponse) -> list[InputItem]:
    """Return the input items of a stored response."""
    return _items.decode(stored.inputs)


def _turns(stored: StoredResponse) -> list[InputItem]:
    """Return the input and output items of a response that a conversation continues. Runs in the store's thread."""
    answer = _output.decode(stored.body)
    if answer.status == "failed" or answer.status in UNENDED:
        raise NotContinued(answer.status)
    return [*inputs_of(stored), *answer.output]


def _all_items(stored: StoredResponse) -> list[InputItem]:
    """Return all items that a request can refer to. Runs in the store's thread."""
    return [*inputs_of(stored), *_output.decode(stored.body).output]


async def _reserve_more(record: RequestRecord, size_bytes: int) -> None:
    """Reserve memory for stored items, which are counted as a part of the request's body."""
    record.body_bytes += size_bytes
    await reserve(record, record.body_bytes)
