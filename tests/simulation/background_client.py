"""Client of a background response: it creates the response, then polls or streams it until it has ended, over the ends
of any number of gateways.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.simulation.http_call import HttpCall
from tests.simulation.simulated_worker import answer_ids, text_of
from tests.simulation.world import Violated, World

PATH = "/v1/responses"
ENDS = frozenset({"completed", "incomplete", "failed", "cancelled"})
# Errors that mean that the journal, from which the next gateway resumes, is missing.
JOURNAL_LOST = ("The server was restarted while it", "The server stopped.")
# Statuses of an answer after which the client asks again.
AGAIN = frozenset({429, 503})
# Part of the streams that begin with events which the client has.
AGAIN_RATE = 0.3


@dataclass(slots=True)
class BackgroundPlan:
    """One background response, and how its client behaves."""

    number: int
    at_s: float
    model: str
    key: str
    max_tokens: int | None
    # Share of the requests that stream events; the others retrieve the state.
    streams: float
    pause_s: float
    # Number of requests after which the client cancels or deletes the response.
    cancels_after: int | None
    deletes_after: int | None
    # Probability that another key tries to reach the response, at each request.
    intruders: float
    # The gateway is killed some milliseconds after the answer to this request.
    killing: str

    @property
    def prompt(self) -> str:
        return f"{self.key} asks in the background {self.number}"

    @property
    def answer(self) -> list[int]:
        return answer_ids(self.model, self.prompt)[: self.max_tokens]


def draw_background_plan(
    random: Random, number: int, models: list[str], keys: list[str], span_s: float
) -> BackgroundPlan:
    return BackgroundPlan(
        number,
        random.random() * span_s,
        random.choice(models),
        random.choice(keys),
        random.choice((None, None, 1, 5, 20)),
        random.choice((0.0, 0.5, 1.0, 1.0)),
        random.choice((0.01, 0.2, 3.0, 20.0)),
        random.randint(0, 4) if random.random() < 0.15 else None,
        random.randint(0, 4) if random.random() < 0.15 else None,
        random.choice((0.0, 0.3)),
        random.choice(("", "", "", "create", "cancel", "delete", "stream", "retrieve")),
    )


def number_of(prompt: str) -> int:
    """Return the number of the plan with this prompt."""
    return int(prompt.rsplit(" ", 1)[-1])


@dataclass(frozen=True, slots=True)
class Trouble:
    """Newest times at which something happened that excuses a loss; minus infinity if it never did."""

    power_cut_at: float
    # A disk that is full or slow, which loses journals.
    disk_at: float
    # A statement of SQLite that failed. Until the last state is stored, only the journal has the response, without a
    # failure or a cancellation.
    database_at: float


Send = Callable[[HttpCall, str, int], Awaitable[bool]]


class BackgroundClient:
    """Owner of one background response. `send` sends a request with a key to the gateway, or to the next one."""

    def __init__(
        self,
        world: World,
        plan: BackgroundPlan,
        random: Random,
        send: Send,
        trouble: Callable[[], Trouble],
        kill: Callable[[], None],
        *,
        is_allowed: bool,
    ) -> None:
        """`is_allowed` says whether the plan's key may use its model."""
        self.world = world
        self.plan = plan
        self.id: str | None = None
        self.status = ""
        self._random = random
        self._send = send
        self._trouble = trouble
        self._kill = kill
        self._is_allowed = is_allowed
        self._killing = plan.killing
        self._text = text_of(plan.answer)
        self._created_at = 0.0
        # Text and number of the newest event that was streamed. After a power cut the numbers have a gap.
        self._seen = ""
        self._number = -1
        # Texts of events by number. A client may ask for some of them again, and must get the same.
        self._texts: dict[int, str] = {}
        self._newest = -1
        self._own_random = Random(repr(plan))
        self._is_after_gap = False
        self._can_stream = True
        self._is_cancelled = self._is_deleted = False
        self._is_over = False
        self._rest = b""

    async def run(self) -> None:
        await asyncio.sleep(self.plan.at_s)
        await self._create()
        self._kill_after("create")
        asked = 0
        while self.id is not None and not self._is_over:
            # Its pauses grow, so that a slow load costs few requests.
            await asyncio.sleep(min(20.0, self.plan.pause_s * (1 + asked)) * self._random.random() + 0.001)
            if self._random.random() < self.plan.intruders:
                await self._intrude()
            if asked == self.plan.cancels_after:
                await self._cancel()
                self._kill_after("cancel")
            elif asked == self.plan.deletes_after:
                await self._delete()
                self._kill_after("delete")
            elif self._can_stream and self._random.random() < self.plan.streams:
                await self._stream()
                self._kill_after("stream")
            else:
                await self._retrieve()
                self._kill_after("retrieve")
            asked += 1
        self.world.note(f"background {self.plan.number}: {self.status}")

    def _kill_after(self, request: str) -> None:
        if request == self._killing:
            self._killing = ""
            self.world.loop.call_later(self._random.random() ** 2 * 0.01, self._kill)

    async def check(self) -> None:
        """Check that the response, which has ended, is still what it was."""
        if self.id is not None and self.status in ENDS:
            await self._retrieve()

    async def _call(
        self,
        method: str,
        path: str,
        query: str = "",
        body: dict[str, Any] | None = None,
        on_piece: Callable[[bytes], bool] | None = None,
        key: str | None = None,
    ) -> HttpCall:
        data = b"" if body is None else json.dumps(body).encode()
        call = HttpCall(method, path, query, data, on_piece)
        is_valid = await self._send(call, key or self.plan.key, 50000 + self.plan.number)
        if call.is_complete and call.status == 401 and not is_valid:
            self._is_over = True  # Its key was revoked.
            self.status = self.status or "unauthorized"
        if call.status == 500:
            raise Violated(f"{self.plan}: {method} {path}: {bytes(call.body)!r}")
        return call

    async def _create(self) -> None:
        plan = self.plan
        is_streamed = self._random.random() < plan.streams
        body: dict[str, Any] = {"model": plan.model, "input": plan.prompt, "background": True, "stream": is_streamed}
        if plan.max_tokens is not None:
            body["max_output_tokens"] = plan.max_tokens
        self._created_at = self.world.loop.time()
        call = await self._call("POST", PATH, body=body, on_piece=self._read if is_streamed else None)
        if call.status == 200 and not self._is_allowed:
            raise Violated(f"{plan}: its key may not use its model")
        if not is_streamed and call.status == 200 and call.is_complete:
            self._note_state(json.loads(call.body))
        elif call.is_complete and call.status != 200 and self.world.is_calm:
            raise Violated(f"{plan}: refused: {call.status} {bytes(call.body)!r}")
        if is_streamed:
            self._end_stream(call)

    async def _retrieve(self) -> None:
        call = await self._call("GET", f"{PATH}/{self.id}")
        if call.status == 200 and call.is_complete:
            self._note_state(json.loads(call.body))
        else:
            self._note_failure(call)

    async def _stream(self) -> None:
        self._newest = self._number
        if self._number >= 0 and self._own_random.random() < AGAIN_RATE:
            self._newest = self._own_random.randint(-1, self._number)
        query = "stream=true" if self._newest < 0 else f"stream=true&starting_after={self._newest}"
        call = await self._call("GET", f"{PATH}/{self.id}", query, on_piece=self._read)
        if call.status == 400 and json.loads(call.body)["error"]["code"] == "events_gone":
            self._can_stream = False
        elif call.status != 200:
            self._note_failure(call)
        self._end_stream(call)

    async def _cancel(self) -> None:
        call = await self._call("POST", f"{PATH}/{self.id}/cancel")
        self._is_cancelled = True
        if call.status == 200 and call.is_complete:
            self._note_state(json.loads(call.body))
        else:
            self._note_failure(call)

    async def _delete(self) -> None:
        call = await self._call("DELETE", f"{PATH}/{self.id}")
        # The answer may have been lost.
        self._is_deleted = True
        if call.status == 200 and call.is_complete:
            self.status, self._is_over = "deleted", True
            again = await self._call("GET", f"{PATH}/{self.id}")
            if again.is_complete and again.status == 200:
                raise Violated(f"{self.plan}: it is there after it was deleted: {bytes(again.body)!r}")
        else:
            self._note_failure(call)

    async def _intrude(self) -> None:
        """Try to reach the response with another key."""
        key = "bob" if self.plan.key == "alice" else "alice"
        path = f"{PATH}/{self.id}"
        method, path, query, body = self._random.choice(
            (
                ("GET", path, "", None),
                ("GET", path, "stream=true", None),
                ("GET", f"{path}/input_items", "", None),
                ("POST", f"{path}/cancel", "", None),
                ("DELETE", path, "", None),
                ("POST", PATH, "", {"model": self.plan.model, "input": "go on", "previous_response_id": self.id}),
            )
        )
        call = HttpCall(method, path, query, b"" if body is None else json.dumps(body).encode())
        await self._send(call, key, 60000 + self.plan.number)
        if not call.is_complete or call.status in AGAIN or call.status == 401:
            return
        code = (json.loads(call.body).get("error") or {}).get("code")
        known = (404, "response_not_found"), (400, "previous_response_not_found"), (404, "model_not_found")
        if (call.status, code) not in known:
            raise Violated(f"{self.plan}: {key} gets {call.status} for {method} {path}: {bytes(call.body)!r}")

    # -- what was seen -------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> bool:
        """Read a piece of a stream. Return whether the client stays."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            for line in block.splitlines():
                if line.startswith(b"data: {"):
                    self._note_event(json.loads(line[6:]))
        return self._random.random() < 0.97

    def _end_stream(self, call: HttpCall) -> None:
        self._rest = b""
        if call.status == 200 and call.is_complete and self.status not in ENDS:
            raise Violated(f"{self.plan}: its stream ended without its last event")

    def _note_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "error":
            self._can_stream = False
            return
        number, newest, text = event["sequence_number"], self._newest, str(event.get("delta", ""))
        if number <= newest:
            raise Violated(f"{self.plan}: event {number} after event {newest}")
        self._newest = number
        if number <= self._number:
            if self._texts.get(number) != text:
                raise Violated(f"{self.plan}: event {number} is {text!r}, and was {self._texts.get(number)!r}")
            return
        self._texts[number] = text
        if self.status in ENDS:
            raise Violated(f"{self.plan}: event {number} after its end: {event}")
        power_cut_at = self._trouble().power_cut_at
        if number > self._number + 1:
            if power_cut_at <= self._created_at:
                raise Violated(f"{self.plan}: event {number} after event {self._number}")
            self._is_after_gap = True
        self._number = number
        match event["type"]:
            case "response.output_text.delta":
                self._seen += event["delta"]
                if not self._is_after_gap and not self._text.startswith(self._seen):
                    raise Violated(f"{self.plan}: the text {self._seen!r} is not the model's answer {self._text!r}")
            case "response.completed" | "response.incomplete" | "response.failed" | "response.created":
                self._note_state(event["response"])
            case _:
                pass

    def _note_state(self, state: dict[str, Any]) -> None:
        """Check a state of the response."""
        plan, status = self.plan, state["status"]
        self.id = self.id or state["id"]
        if state["id"] != self.id:
            raise Violated(f"{plan}: the state of another response: {state}")
        text = "".join(part["text"] for item in state["output"] for part in item["content"])
        if not self._text.startswith(text):
            raise Violated(f"{plan}: the text {text!r} is not the model's answer {self._text!r}")
        is_lost = self._is_excused()
        if len(text) < len(self._seen) and not self._is_after_gap and not is_lost and status != "queued":
            raise Violated(f"{plan}: the state {status} has {text!r}, after the events {self._seen!r}")
        if self.status in ENDS and status != self.status and not is_lost and not self._may_resume():
            raise Violated(f"{plan}: it is {status} after it was {self.status}")
        match status:
            case "completed" | "incomplete":
                tokens = state["usage"]["output_tokens"]
                if text != self._text or tokens != len(plan.answer):
                    raise Violated(f"{plan}: {status} with {tokens} tokens and {text!r} of {self._text!r}")
            case "failed":
                message = state["error"]["message"]
                self.world.note(f"background {plan.number} failed: {message}")
                if message.startswith(JOURNAL_LOST) and not is_lost:
                    raise Violated(f"{plan}: its journal is lost: {message}")
                if message.startswith("Internal error") and "spawn" not in self.world.faults:
                    raise Violated(f"{plan}: the gateway failed")
            case "cancelled":
                if not self._is_cancelled and plan.key not in self.world.revoked:
                    raise Violated(f"{plan}: it is cancelled, but nobody has cancelled it")
            case _:
                pass
        self.status = status
        self._is_over = self._is_over or status in ENDS

    def _is_excused(self) -> bool:
        """Whether the response's journal, or its newest state in the store, may be lost."""
        trouble = self._trouble()
        return max(trouble.power_cut_at, trouble.disk_at) >= self._created_at

    def _may_resume(self) -> bool:
        """Whether the response may go on after an end that only the store knew."""
        return self.status in ("failed", "cancelled") and self._trouble().database_at >= self._created_at

    def _note_failure(self, call: HttpCall) -> None:
        if call.is_cut or call.has_left or call.status in AGAIN or call.status == 401:
            return
        if call.status == 404 and self._is_deleted:
            self.status, self._is_over = "deleted", True
        elif call.status == 404 and (self._is_excused() or self.plan.key in self.world.revoked):
            self.status, self._is_over = "lost", True
        elif call.status != 200:
            raise Violated(f"{self.plan}: {call.method} {call.path}: {call.status} {bytes(call.body)!r}")
