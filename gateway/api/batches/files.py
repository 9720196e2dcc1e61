"""`/v1/files`: upload, list, retrieve and delete files of batches, and read their content."""

import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.batches.batch_store import BatchStore
from gateway.api.batches.paging import BINARY, limit_of, page_after, path_id, send_content
from gateway.api.batches.records import FILE_PREFIX, RECORD_AGE_S, StoredFile, new_name
from gateway.api.batches.upload import FIELD, UploadedContent, receive_form
from gateway.api.common.decode import converted
from gateway.api.common.doc_hints import shape, words
from gateway.errors import BadRequest, invalid_choice, missing_parameter
from gateway.http.exchange import send_body
from gateway.http.multipart import MultipartForm
from gateway.request.headers import ignored_header
from gateway.request.record import record_of

PAGE_MAX: Final = 10_000
PURPOSE: Final = "batch"
PURPOSES: Final = (PURPOSE, "batch_output")
ANCHOR: Final = "created_at"
EXPIRY_MIN_S: Final = 3600
EXPIRY_MAX_S: Final = 2_592_000
FILENAME_CHARS_MAX: Final = 255
ExpirySeconds = Annotated[int, Meta(ge=EXPIRY_MIN_S, le=EXPIRY_MAX_S)]
Anchor = Annotated[str, words(ANCHOR)]

_encode = msgspec.json.Encoder().encode


class FileUpload(Struct, frozen=True, kw_only=True):
    """`POST /v1/files`, as a form. The file's bytes are passed separately."""

    file: Annotated[str, shape({"contentMediaType": "application/octet-stream"})]
    purpose: Annotated[str, words(PURPOSE)]
    anchor: Anchor | None = field(default=None, name="expires_after[anchor]")
    seconds: ExpirySeconds | None = field(default=None, name="expires_after[seconds]")


class FileObject(Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class FileList(Struct, frozen=True, tag_field="object", tag="list"):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, tag_field="object", tag="file"):
    id: str
    deleted: bool = True


class FileEndpoints:
    """Endpoints of files. Each is an ASGI handler."""

    def __init__(
        self,
        store: BatchStore,
        on_upload: Callable[[], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._on_upload = on_upload
        self._wall = wall

    async def upload_or_list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST` and `GET` of `/v1/files`."""
        if scope["method"] == "POST":
            await self._upload(scope, receive, send)
        else:
            await self._list(scope, send)

    async def get_or_delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET` and `DELETE` of `/v1/files/{id}`."""
        file = self._store.file(record_of(scope).caller.owner, path_id(scope))
        if scope["method"] == "DELETE":
            await self._store.delete(file.id)
            await send_body(send, 200, _encode(DeletedFile(file.id)))
        else:
            await send_body(send, 200, _encode(self._view(file)))

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /v1/files/{id}/content`."""
        file = self._store.file(record_of(scope).caller.owner, path_id(scope))
        await send_content(send, [(file, file.size_bytes)], self._store.read, BINARY)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        tenant = record.caller.owner
        self._store.check_on()
        self._store.check_room(tenant, 0)
        async with UploadedContent(self._store, tenant) as content:
            form = await receive_form(content, self._store, record, scope, receive)
            request, unknown = _request(form)
            now = self._wall()
            file = StoredFile(
                id=new_name(FILE_PREFIX),
                tenant=tenant,
                purpose="batch",
                filename=form.filename[:FILENAME_CHARS_MAX] or FIELD,
                size_bytes=content.size_bytes,
                created=now,
                expires=None if request.seconds is None else now + request.seconds,
            )
            await self._store.add_upload(content.path, content.size_bytes, file)
            content.take()
        self._on_upload()
        await send_body(send, 200, _encode(self._view(file)), ignored_header(unknown))

    async def _list(self, scope: Scope, send: Send) -> None:
        query = QueryParams(scope["query_string"])
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise invalid_choice(order, ("asc", "desc"), "order")
        tenant = record_of(scope).caller.owner
        own = [file for file in self._store.files.values() if file.tenant == tenant and purpose in (None, file.purpose)]
        page, has_more = page_after(
            own if order == "asc" else own[::-1], query.get("after"), limit_of(query, PAGE_MAX, PAGE_MAX)
        )
        ids = [file.id for file in page] or [None]
        await send_body(send, 200, _encode(FileList(list(map(self._view, page)), ids[0], ids[-1], has_more)))

    def _view(self, file: StoredFile) -> FileObject:
        return FileObject(
            id=file.id,
            bytes=file.size_bytes,
            created_at=int(file.created),
            expires_at=int(file.expires or file.created + RECORD_AGE_S),
            filename=file.filename,
            purpose=file.purpose,
        )


def _request(form: MultipartForm) -> tuple[FileUpload, list[str]]:
    """Check the fields of a form. Returns the names of unknown fields too. Raises `BadRequest`."""
    names = set(FileUpload.__struct_encode_fields__)
    values: dict[str, Any] = {name: value for name, value in form.fields if name in names}
    if form.file is None:
        raise missing_parameter(FIELD)
    if "purpose" not in values:
        raise missing_parameter("purpose")
    request = converted(values | {FIELD: ""}, FileUpload, "", strict=False)
    if request.purpose != PURPOSE:
        raise invalid_choice(request.purpose, (PURPOSE,), "purpose")
    check_expiry(request.anchor, request.seconds, "expires_after")
    return request, [name for name, _ in form.fields if name not in names]


def check_expiry(anchor: str | None, seconds: int | None, name: str) -> None:
    """Raises `BadRequest` unless both are given, or neither."""
    if anchor not in (None, ANCHOR):
        raise invalid_choice(anchor, (ANCHOR,), f"{name}[anchor]")
    if (anchor is None) is not (seconds is None):
        missing = f"{name}[{'anchor' if anchor is None else 'seconds'}]"
        raise BadRequest(f"'{name}' needs 'anchor' and 'seconds'.", missing, "missing_required_parameter")
