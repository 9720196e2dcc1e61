"""Captures of bodies that are no text: their size and digest alone."""

import hashlib
from typing import Any

import pytest
from starlette.types import Message

from gateway.http.capture import Recorder
from gateway.request.record import RequestRecord

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_form_and_spoken_bytes_are_told_by_size_and_digest() -> None:
    asked, answered = b"--b\r\nsecret sound" * 100, bytes(range(256))
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": asked, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"headers": [(b"content-type", b"multipart/form-data; boundary=b")]}
    tape = Recorder(scope, receive, send)
    await tape.receive()
    await tape.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"audio/wav")]})
    await tape.send({"type": "http.response.body", "body": answered[:100], "more_body": True})
    await tape.send({"type": "http.response.body", "body": answered[100:]})
    captured = tape.captured(RequestRecord("r", "POST", "/v1/audio/speech"))
    digests = [hashlib.blake2b(data, digest_size=32).hexdigest()[:16] for data in (asked, answered)]
    assert captured.request_body == f"[{len(asked)} bytes, {digests[0]}]"
    assert captured.response_body == f"[256 bytes, {digests[1]}]"
    assert len(sent) == 3
