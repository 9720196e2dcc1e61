"""Calls for token counts, texts and explanations, answered on a thread of their own so that no generation waits for
them."""

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

from protocol.failures import Code, Failure
from protocol.from_worker import Explained, Rejected, Tokenized, Up
from protocol.to_worker import Detokenize, Explain, Tokenize
from worker.engine.gauges import Gauges
from worker.model import memory

TokenCall = Tokenize | Detokenize
WorkerCall = TokenCall | Explain
ExplainMiss = Callable[[Explain], Explained]

MAX_WAITING_CALLS: Final = 64
# Nice value of the thread: on Linux a thread may lower its own priority, so that other threads run first.
_THREAD_NICE: Final = 10
# Size in characters or ids above which a call's free heap memory is returned to the system.
_LARGE_CALL_SIZE: Final = 1 << 18


class CallAnswerer(Protocol):
    """Interface to the tokens of a model; the intake of every type of worker implements it."""

    def tokenize(self, request: TokenCall, is_wanted: Callable[[], bool]) -> Tokenized | None:
        """Count or decode tokens; return None as soon as the result is not wanted any more. Raises `RequestInvalid`."""
        ...


class TokenizeCalls:
    """Queue of calls, answered one by one. The receiving thread calls `put` and `abort`."""

    def __init__(
        self,
        intake: CallAnswerer,
        send: Callable[[Up], None],
        refusing: Callable[[int], AbstractContextManager[None]],
        gauges: Gauges,
        explain: ExplainMiss | None = None,
    ) -> None:
        """`refusing(rid)` returns a context manager that turns any error inside it into a `Rejected` of `rid`. A model
        without a prefix cache has no `explain`."""
        self._explain = explain or _explain_nothing
        self._intake = intake
        self._send = send
        self._refusing = refusing
        self._gauges = gauges
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, WorkerCall] = OrderedDict()
        # Rid of the call that is being answered.
        self._rid: int | None = None
        # Whether the client still wants the answer of the current call.
        self._is_wanted = True

    def start(self) -> None:
        threading.Thread(target=self._run, name="tokenize calls", daemon=True).start()

    def put(self, call: WorkerCall) -> None:
        """Queue a call, or refuse it if too many are waiting."""
        with self._changed:
            if is_full := len(self._waiting) >= MAX_WAITING_CALLS:
                self._gauges.refused_tokenize_calls += 1
            else:
                self._waiting[call.rid] = call
                self._changed.notify()
        if is_full:
            message = f"{MAX_WAITING_CALLS} requests to count or decode tokens are waiting for the model; try again"
            self._send(Rejected(call.rid, Failure(Code.BUSY, message)))

    def abort(self, rids: Iterable[int]) -> list[int]:
        """Cancel calls whose clients have disconnected. Return the rids that do not belong to calls."""
        others: list[int] = []
        with self._changed:
            for rid in rids:
                if rid == self._rid:
                    self._is_wanted = False
                elif self._waiting.pop(rid, None) is None:
                    others.append(rid)
        return others

    def _run(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _THREAD_NICE)
        while True:
            call = self._next()
            with self._refusing(call.rid):
                if isinstance(call, Explain):
                    self._send(self._explain(call))
                    continue
                answer = self._intake.tokenize(call, lambda: self._is_wanted)
                if answer is not None:
                    self._send(answer)
                if answer is None or max(answer.count, len(answer.text)) > _LARGE_CALL_SIZE:
                    answer = None
                    memory.give_back_heap()

    def _next(self) -> WorkerCall:
        with self._changed:
            self._rid = None
            while not self._waiting:
                self._changed.wait()
            self._rid, call = self._waiting.popitem(last=False)
            self._is_wanted = True
            return call


def _explain_nothing(call: Explain) -> Explained:
    return Explained(call.rid)
