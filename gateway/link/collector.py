"""Collector of a worker's messages about the sequences of one HTTP request. It merges them while the client is slow."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, cast

from protocol.from_worker import Delta, DeltaKind, Progress

# Kinds whose consecutive deltas may be merged. TOOL_BEGIN and TOOL_END are missing, because they are events and not
# text.
_MERGEABLE: Final = frozenset({DeltaKind.TEXT, DeltaKind.REASONING, DeltaKind.TOOL_ARGS})

# Function that reads a collector's unread deltas. It returns False if the reader cannot take them now.
OnUnread = Callable[[], bool]


class Collector:
    """Deltas and prompt facts of the sequences of one request, for one reader.

    The link calls `append_delta`, `wake_reader`, `send_delta` and the `note_` methods; one task calls `read_deltas`. No
    delta is dropped, and the deltas of each request id (rid) stay in order. Consecutive unread deltas of one rid and
    kind are merged, so the memory for a slow reader is bounded by its prompt and `max_tokens`. Each rid has exactly one
    terminal delta.
    """

    __slots__ = (
        "_deadline",
        "_has_end",
        "_has_progressed",
        "_has_runs",
        "_loop",
        "_newest",
        "_on_unread",
        "_patience_s",
        "_timer",
        "_unfinished",
        "_unread",
        "_waiter",
        "accepted",
        "cached",
        "deviations",
        "epoch",
        "last_activity",
        "on_accepted",
        "prefill_began_at",
        "progress",
        "resumes",
        "rids",
        "truncated",
        "wakes_on_progress",
    )

    def __init__(self, rids: Sequence[int], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self.rids = tuple(rids)
        # Number of prompt tokens by rid.
        self.accepted: dict[int, int] = {}
        # Parts of the request's JSON schema that the grammar does not enforce. They are the same for all sequences.
        self.deviations: tuple[str, ...] = ()
        # Numbers of turns and of tokens that were left out of the prompt. If the request has several sequences, these
        # are the numbers of the sequence that lost the most turns.
        self.truncated = (0, 0)
        # Number of cached prompt tokens by rid.
        self.cached: dict[int, int] = {}
        # Times on the event loop's clock.
        self.prefill_began_at: float | None = None
        # Progress of the sequence that reported last.
        self.progress: Progress | None = None
        # Whether progress wakes the reader, as a delta does.
        self.wakes_on_progress = False
        self.last_activity = self._loop.time()
        # Epoch of the worker that has the request, and how often a sequence went on at another worker.
        self.epoch = 0
        self.resumes = 0
        # Callback for an accepted sequence, which gets the sequence's rid and number of prompt tokens. The callback may
        # end the request.
        self.on_accepted: Callable[[int, int], None] | None = None
        self._unfinished = set(rids)
        # An entry that is a list contains deltas that are merged when they are read.
        self._unread: list[Delta | list[Delta]] = []
        # Maps each rid to the index of its newest entry in `_unread`.
        self._newest: dict[int, int] = {}
        # Whether `_unread` contains a terminal delta, and whether it contains a list.
        self._has_end = self._has_runs = False
        # Whether there is progress of which the reader does not know yet.
        self._has_progressed = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_unread: OnUnread | None = None
        self._patience_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the terminal deltas of all rids were read."""
        return not self._unfinished and not self._unread

    # -- called by the link ------------------------------------------------------------------------------------------

    def send_delta(self, delta: Delta) -> None:
        """Append a delta and wake the reader."""
        self.append_delta(delta, self._loop.time())
        self.wake_reader()

    def append_delta(self, delta: Delta, now: float) -> None:
        """Append a delta without waking the reader. A delta after its rid's terminal delta is ignored."""
        rid = delta.rid
        if rid not in self._unfinished:
            return
        self.last_activity = now
        index = self._newest.get(rid)
        if index is None or not self._merge(index, delta):
            self._newest[rid] = len(self._unread)
            self._unread.append(delta)
        if delta.finish is not None:
            self._unfinished.discard(rid)
            self._has_end = True

    def wake_reader(self) -> None:
        """Let the reader's `on_unread` read the unread deltas.

        The reader's task is woken instead if it has no `on_unread`, if a terminal delta is unread, or if `on_unread`
        returns False.
        """
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._unread:
            return
        if self._on_unread is not None and not self._has_end:
            try:
                if self._on_unread():
                    self._deadline = self.last_activity + self._patience_s
                    return
            except Exception as error:  # `on_unread` belongs to the reader, so its exception is raised there.
                waiter.set_exception(error)
                return
        waiter.set_result(None)

    def note_accepted(
        self, rid: int, prompt_tokens: int, deviations: tuple[str, ...] = (), truncated: tuple[int, int] = (0, 0)
    ) -> None:
        self.last_activity = self._loop.time()
        self.accepted[rid] = prompt_tokens
        self.deviations = deviations
        self.truncated = max(self.truncated, truncated)
        if self.on_accepted is not None:
            self.on_accepted(rid, prompt_tokens)

    def note_progress(self, progress: Progress) -> None:
        self.last_activity = self._loop.time()
        if self.prefill_began_at is None:
            self.prefill_began_at = self.last_activity - progress.elapsed_ms / 1000
        self.progress = progress
        self.cached[progress.rid] = progress.cached
        if self.wakes_on_progress:
            self._has_progressed = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def note_activity(self) -> None:
        """Record that the worker is working on this request, even if there is no delta to read."""
        self.last_activity = self._loop.time()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- called by the reader ----------------------------------------------------------------------------------------

    async def read_deltas(self, timeout_s: float | None = None, on_unread: OnUnread | None = None) -> list[Delta]:
        """Wait for a delta and return all unread deltas. The list is empty on timeout, after progress that
        `wakes_on_progress`, and immediately if `is_done`.

        During the wait, the link's callback calls `on_unread` to read all deltas except terminal ones. This saves a
        task switch per token and restarts the timeout. Deltas that `on_unread` does not read are returned here, and its
        exception is raised here.
        """
        if not self._unread and self._unfinished and not self._has_progressed:
            await self._wait(timeout_s, on_unread)
        return self.read_deltas_nowait()

    def read_deltas_nowait(self) -> list[Delta]:
        unread = self._unread
        if not unread:
            return []
        self._unread = []
        self._newest.clear()
        self._has_end = False
        if not self._unfinished:
            self.stop_timer()
        if not self._has_runs:
            return cast("list[Delta]", unread)
        self._has_runs = False
        return [item if isinstance(item, Delta) else _merged(item) for item in unread]

    def read_progress(self) -> Progress | None:
        """Return the newest progress if it was not read yet."""
        if not self._has_progressed:
            return None
        self._has_progressed = False
        return self.progress

    def _merge(self, index: int, delta: Delta) -> bool:
        last = self._unread[index]
        if isinstance(last, list):
            if not _is_mergeable(last[0], delta):
                return False
            last.append(delta)
            return True
        if not _is_mergeable(last, delta):
            return False
        self._unread[index] = [last, delta]
        self._has_runs = True
        return True

    async def _wait(self, timeout_s: float | None, on_unread: OnUnread | None) -> None:
        assert self._waiter is None, "a collector has one reader"
        self._waiter = waiter = self._loop.create_future()
        self._on_unread = on_unread
        self._patience_s = float("inf") if timeout_s is None else timeout_s
        self._deadline = self._loop.time() + self._patience_s
        if timeout_s is not None and (self._timer is None or self._timer.when() > self._deadline):
            self._start_timer()
        try:
            await waiter
        finally:
            self._waiter = self._on_unread = None

    def _start_timer(self) -> None:
        self.stop_timer()
        self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        # One timer serves many waits. If the deadline has moved when the timer fires, a new timer is started.
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done() or self._deadline == float("inf"):
            return
        if self._loop.time() < self._deadline:
            self._start_timer()
        else:
            waiter.set_result(None)


def _is_mergeable(first: Delta, delta: Delta) -> bool:
    if delta.kind is not first.kind or delta.kind not in _MERGEABLE:
        return False
    if first.data or delta.data or first.prompt is not None or delta.prompt is not None:
        return False
    return (delta.tool and delta.tool.index) == (first.tool and first.tool.index)


def _merged(run: list[Delta]) -> Delta:
    first, last = run[0], run[-1]
    scored = [delta.logprobs for delta in run if delta.logprobs is not None]
    return Delta(
        first.rid,
        kind=first.kind,
        text="".join([delta.text for delta in run]),
        token_ids=tuple([token for delta in run for token in delta.token_ids]),
        tool=first.tool,
        logprobs=tuple([entry for entries in scored for entry in entries]) if scored else None,
        finish=last.finish,
        usage=last.usage,
        failure=last.failure,
        stop=last.stop,
        ending_ids=last.ending_ids,
    )
