"""Conversations that a WebSocket can continue although they are not stored: the newest of each stream, in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.api.responses import response as out
from gateway.api.responses.request import InputItem
from gateway.request.body_memory import BodyLease

# A failed response cannot be continued.
_CONTINUED: Final = frozenset({"completed", "incomplete", "cancelled"})

_encode = msgspec.json.Encoder().encode
_items = msgspec.json.Decoder(list[InputItem])


@dataclass(frozen=True, slots=True, eq=False)
class SocketConversation:
    """All items up to a response's last one, and their approximate size as JSON."""

    response_id: str
    items: list[InputItem]
    size_bytes: int
    lease: BodyLease


class ConversationMemory:
    """Memory of the conversations of all WebSockets, a part of that for request bodies. If there is no room, the oldest
    conversations are dropped.
    """

    def __init__(self, lease: Callable[[], BodyLease], limit_bytes: Callable[[], int]) -> None:
        self.lease = lease
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        # Functions that drop the conversations, the oldest first.
        self._kept: dict[SocketConversation, Callable[[], None]] = {}

    def hold(self, kept: SocketConversation, drop: Callable[[], None]) -> bool:
        """Reserve memory for a conversation. Returns False if there is none; `drop` must call `release` later."""
        limit = self._limit_bytes()
        while self._kept and self._used_bytes + kept.size_bytes > limit:
            next(iter(self._kept.values()))()
        if kept.size_bytes > limit or not kept.lease.hold(kept.size_bytes):
            return False
        self._kept[kept] = drop
        self._used_bytes += kept.size_bytes
        return True

    def release(self, kept: SocketConversation) -> None:
        del self._kept[kept]
        self._used_bytes -= kept.size_bytes
        kept.lease.close()


class SocketHistory:
    """The newest conversation of each stream of one WebSocket."""

    def __init__(self, memory: ConversationMemory, owner: str) -> None:
        self._memory = memory
        self._owner = owner
        self._newest: dict[str, SocketConversation] = {}

    def find(self, response_id: str) -> SocketConversation | None:
        """Return the conversation that ends with this response."""
        return next((each for each in self._newest.values() if each.response_id == response_id), None)

    def keep(self, stream: str, response: out.Response, before: list[InputItem], size_bytes: int) -> None:
        """Keep a response that follows the items `before`, in place of the stream's earlier one.

        If there is no memory for it, it cannot be continued.
        """
        if response.status not in _CONTINUED:
            return
        output = _encode(response.output)
        lease = self._memory.lease()
        lease.owner = self._owner
        items = [*before, *_items.decode(output)]
        kept = SocketConversation(response.id, items, size_bytes + len(output), lease)
        self._drop(stream)
        if self._memory.hold(kept, lambda: self._drop(stream)):
            self._newest[stream] = kept

    def evict(self, stream: str, response_id: str | None) -> None:
        """Drop the stream's conversation if it ends with this response."""
        kept = self._newest.get(stream)
        if kept is not None and kept.response_id == response_id:
            self._drop(stream)

    def close(self) -> None:
        """Drop all conversations."""
        for stream in list(self._newest):
            self._drop(stream)

    def _drop(self, stream: str) -> None:
        kept = self._newest.pop(stream, None)
        if kept is not None:
            self._memory.release(kept)


def as_input(output: Sequence[out.Item]) -> list[InputItem]:
    """Return output items in the form in which a client sends them back."""
    return _items.decode(_encode(output))
