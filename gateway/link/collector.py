"""Collector of a worker's messages about the sequences of one HTTP request, merged while the client is slow."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from protocol.failures import Failure
from protocol.from_worker import Delta, DeltaKind, Finish, TokenLogprob

# A TOOL_BEGIN or TOOL_END is an event, not text: two of them are never one.
_JOINABLE: Final = frozenset({DeltaKind.TEXT, DeltaKind.REASONING, DeltaKind.TOOL_ARGS})

# Takes what is unread, and says whether it could.
Relay = Callable[[], bool]


class Collector:
    """Everything said about the sequences of one request, for one reader.

    The link adds and delivers, one task reads. Nothing is dropped and the order per rid is kept; unread deltas of one
    rid and kind become one, so what waits for a slow reader is bounded by its prompt and `max_tokens`. Exactly one
    terminal delta per rid comes out, whatever is put. A terminal delta that the gateway made (`fail`) carries no usage.
    """

    __slots__ = (
        "_deadline",
        "_has_end",
        "_has_runs",
        "_loop",
        "_open",
        "_patience_s",
        "_relay",
        "_tails",
        "_timer",
        "_unread",
        "_waiter",
        "accepted",
        "began",
        "cached",
        "last_activity",
        "left_out",
        "on_accepted",
        "progress",
        "relaxed",
        "rids",
    )

    def __init__(self, rids: Sequence[int], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self.rids = tuple(rids)
        self.accepted: dict[int, int] = {}
        # What of its schema the grammar of the answer leaves out: the same for all sequences of a request.
        self.relaxed: tuple[str, ...] = ()
        # Turns and tokens that were left out of the prompt; of several, those of the one that lost the most.
        self.left_out = (0, 0)
        # Of each sequence's prompt, as far as that is known.
        self.cached: dict[int, int] = {}
        # When the first prefill was heard of, on the loop's clock.
        self.began: float | None = None
        self.progress: tuple[int, int] | None = None
        self.last_activity = self._loop.time()
        # Called with a sequence and the tokens of its prompt, once its worker has read it; it may end the request.
        self.on_accepted: Callable[[int, int], None] | None = None
        self._open = set(rids)
        self._unread: list[Delta | _Run] = []
        # rid -> index of its newest unread delta
        self._tails: dict[int, int] = {}
        # A terminal delta is among the unread; several that became one are.
        self._has_end = self._has_runs = False
        self._waiter: asyncio.Future[None] | None = None
        self._relay: Relay | None = None
        self._patience_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    @property
    def is_done(self) -> bool:
        """Every rid has had its terminal delta, and it was read."""
        return not self._open and not self._unread

    def put(self, delta: Delta) -> None:
        """Add a delta and deliver."""
        self.add(delta, self._loop.time())
        self.deliver()

    def add(self, delta: Delta, now: float) -> None:
        """Add a delta, `now` on the loop's clock. One that follows its rid's terminal delta is ignored."""
        rid = delta.rid
        if rid not in self._open:
            return
        self.last_activity = now
        index = self._tails.get(rid)
        if index is None or not self._join(index, delta):
            self._tails[rid] = len(self._unread)
            self._unread.append(delta)
        if delta.finish is not None:
            self._open.discard(rid)
            self._has_end = True

    def deliver(self) -> None:
        """Let the reader have what is unread: at once through its relay, or in its task."""
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._unread:
            return
        if self._relay is not None and not self._has_end:
            try:
                if self._relay():
                    self._deadline = self.last_activity + self._patience_s
                    return
            except Exception as error:  # the reader's own, which it gets
                waiter.set_exception(error)
                return
        waiter.set_result(None)

    def fail(self, failure: Failure) -> None:
        """End every unfinished rid with an ERROR delta."""
        for rid in self.rids:
            self.put(Delta(rid, finish=Finish.ERROR, failure=failure))

    def note_accepted(
        self, rid: int, prompt_tokens: int, relaxed: tuple[str, ...] = (), left_out: tuple[int, int] = (0, 0)
    ) -> None:
        self.last_activity = self._loop.time()
        self.accepted[rid] = prompt_tokens
        self.relaxed = relaxed
        self.left_out = max(self.left_out, left_out)
        if self.on_accepted is not None:
            self.on_accepted(rid, prompt_tokens)

    def note_progress(self, rid: int, processed: int, total: int, cached: int = 0) -> None:
        self.last_activity = self._loop.time()
        if self.began is None:
            self.began = self.last_activity
        self.progress = (processed, total)
        self.cached[rid] = cached

    def touch(self) -> None:
        """Something is being done for this request, though there is nothing to read."""
        self.last_activity = self._loop.time()

    async def next(self, timeout_s: float | None = None, relay: Relay | None = None) -> list[Delta]:
        """All unread deltas, waiting for the first. Empty on timeout, and at once when `is_done`.

        While this waits, `relay` is called with anything but an end, in the callback that brought it, and takes it:
        no task's turn for each token. Then the timeout begins again. What it cannot take is returned; what it raises
        is raised here.
        """
        if not self._unread and self._open:
            await self._wait(timeout_s, relay)
        return self.take()

    def take(self) -> list[Delta]:
        """All unread deltas."""
        unread = self._unread
        if not unread:
            return []
        self._unread = []
        self._tails.clear()
        self._has_end = False
        if not self._open:
            self.close()
        if not self._has_runs:
            return cast("list[Delta]", unread)
        self._has_runs = False
        return [item if isinstance(item, Delta) else item.joined() for item in unread]

    def close(self) -> None:
        """Stop the timer. Called by the link when it forgets the request, and at the end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _join(self, index: int, delta: Delta) -> bool:
        last = self._unread[index]
        if isinstance(last, Delta):
            if last.data or last.prompt is not None:
                return False
            if not _is_joinable(last.kind, last.tool and last.tool.index, delta):
                return False
            self._unread[index] = last = _Run(last)
            self._has_runs = True
        elif not _is_joinable(last.first.kind, last.first.tool and last.first.tool.index, delta):
            return False
        last.add(delta)
        return True

    async def _wait(self, timeout_s: float | None, relay: Relay | None) -> None:
        assert self._waiter is None, "a collector has one reader"
        self._waiter = waiter = self._loop.create_future()
        self._relay = relay
        self._patience_s = float("inf") if timeout_s is None else timeout_s
        self._deadline = self._loop.time() + self._patience_s
        if timeout_s is not None and (self._timer is None or self._timer.when() > self._deadline):
            self._arm()
        try:
            await waiter
        finally:
            self._waiter = self._relay = None

    def _arm(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        # The timer outlives many waits: armed once, it looks at the newest deadline when it fires.
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done() or self._deadline == float("inf"):
            return
        if self._loop.time() < self._deadline:
            self._arm()
        else:
            waiter.set_result(None)


def _is_joinable(kind: DeltaKind, tool_index: int | None, delta: Delta) -> bool:
    if delta.kind is not kind or kind not in _JOINABLE or delta.data or delta.prompt is not None:
        return False
    return (delta.tool and delta.tool.index) == tool_index


@dataclass(slots=True)
class _Run:
    """Unread deltas of one rid and kind. Owned by its collector."""

    first: Delta
    last: Delta = field(init=False)
    texts: list[str] = field(init=False)
    token_ids: list[int] = field(init=False)
    logprobs: list[TokenLogprob] | None = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.first
        self.texts = [self.first.text]
        self.token_ids = list(self.first.token_ids)
        self.logprobs = None if self.first.logprobs is None else list(self.first.logprobs)

    def add(self, delta: Delta) -> None:
        self.last = delta
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)

    def joined(self) -> Delta:
        first, last = self.first, self.last
        return Delta(
            first.rid,
            kind=first.kind,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            tool=first.tool,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish=last.finish,
            usage=last.usage,
            failure=last.failure,
            stop=last.stop,
            ending_ids=last.ending_ids,
        )
