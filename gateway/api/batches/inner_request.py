"""Requests of batches, which go through the public app as those of clients do."""

import asyncio
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Scope

from gateway.access.caller import Caller
from gateway.errors import ApiError
from gateway.request.record import BATCH_CALLER

# Statuses of requests that may succeed later, if the answer also says when.
_RETRIED: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """Answer to an inner request."""

    status: int
    request_id: str
    retry_after_s: float
    body: bytes

    @property
    def is_refusal(self) -> bool:
        """Whether the request may succeed later."""
        return self.status in _RETRIED and self.retry_after_s > 0


class InnerRequest:
    """One request. Cancelling its task aborts the generation.

    Instead of a caller, `sender` may be an error, with which the app then answers.
    """

    def __init__(self, sender: Caller | ApiError, path: str, body: bytes, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self._is_read = False
        self._status = 0
        self._retry_after_s = 0.0
        self._answer = bytearray()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            BATCH_CALLER: sender,
        }

    async def answered_by(self, app: ASGIApp) -> InnerAnswer:
        """Send the request to the app and return the whole answer."""
        await app(self._scope, self._receive, self._send)
        return InnerAnswer(self._status, self._request_id, self._retry_after_s, bytes(self._answer))

    async def _receive(self) -> Message:
        if self._is_read:
            # A batch never leaves; its task is cancelled instead.
            await asyncio.get_running_loop().create_future()
        self._is_read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message.get("headers", ()))
            self._retry_after_s = float(headers.get(b"retry-after", b"0"))
        else:
            self._answer += message.get("body", b"")
