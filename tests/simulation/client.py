"""HTTP client of a simulated gateway: it calls the ASGI app in process, reads slowly, or leaves."""

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from starlette.types import Message

from gateway.api.openai.lowering import derive_seed
from tests.simulation.http_call import scope_of
from tests.simulation.simulated_gateway import SimulatedGateway
from tests.simulation.simulated_worker import CHOICES, answer_ids, asked_text, text_of
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.world import Violated, World

PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Plan:
    """One request, and how its client behaves."""

    number: int
    at_s: float
    model: str
    key: str
    max_tokens: int | None
    is_streamed: bool
    # Number of pieces after which the client leaves, and the pause between pieces that it reads.
    leaves_after: int | None
    pause_s: float
    is_refused: bool = False
    choices: int = 1

    @property
    def prompt(self) -> str:
        asked = f"{self.key} {'refused' if self.is_refused else 'asks'} {self.number}"
        return f"{asked} {CHOICES}" if self.choices > 1 else asked

    def answer(self, choice: int) -> list[int]:
        text = asked_text(self.prompt, derive_seed(self.number, choice))
        return answer_ids(self.model, text)[: self.max_tokens]


def draw_plan(random: Random, number: int, models: list[str], keys: list[str], span_s: float) -> Plan:
    return Plan(
        number,
        random.random() * span_s,
        random.choice(models),
        random.choice(keys),
        random.choice((None, None, 1, 5, 20, 200)),
        random.random() < 0.8,
        random.randint(0, 10) if random.random() < 0.15 else None,
        random.choice((0.0, 0.0, 0.0, 0.05, 0.5, 4.0)),
        random.random() < 0.04,
    )


@dataclass(slots=True)
class Outcome:
    """What a client has seen of one request."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    has_left: bool = False
    is_cut: bool = False
    # Text and end of each choice, and error and usage of the answer.
    texts: dict[int, str] = field(default_factory=dict[int, str])
    finishes: dict[int, str] = field(default_factory=dict[int, str])
    error: str = ""
    completion_tokens: int | None = None
    # Number of marks of the end of the stream.
    ends: int = 0

    @property
    def tokens(self) -> int:
        return sum(text.count("w") for text in self.texts.values())


class Client:
    """One request on its way. Its outcome is checked when the app has returned."""

    def __init__(self, world: World, plan: Plan, *, is_allowed: bool = True) -> None:
        """`is_allowed` says whether the plan's key may use its model."""
        self.world = world
        self.plan = plan
        self.is_allowed = is_allowed
        self.outcome = Outcome()
        self._loop: VirtualLoop = world.loop
        self._pieces = 0
        self._left = world.loop.create_future()
        self._has_body = False
        self._began_at = 0.0

    def request_body(self) -> bytes:
        plan = self.plan
        body: dict[str, Any] = {
            "model": plan.model,
            "messages": [{"role": "user", "content": plan.prompt}],
            "stream": plan.is_streamed,
        }
        if plan.max_tokens is not None:
            body["max_tokens"] = plan.max_tokens
        if plan.choices > 1:
            body["n"], body["seed"] = plan.choices, plan.number
        if plan.is_streamed:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()

    async def run(self, gateway: SimulatedGateway, secret: str) -> None:
        plan, self._gateway = self.plan, gateway
        self._began_at = self._loop.time()
        self._body = self.request_body()
        scope = scope_of("POST", PATH, "", secret, self._body, 40000 + plan.number)
        try:
            await gateway.app.entry(scope, self._receive, self._send)
        except asyncio.CancelledError:
            self.outcome.is_cut = True
            raise
        finally:
            self.conclude()

    def conclude(self) -> None:
        """Read and check what the client got."""
        self._read()
        self.check()

    async def _receive(self) -> Message:
        if not self._has_body:
            self._has_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await asyncio.shield(self._left)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        outcome, plan = self.outcome, self.plan
        if self._gateway.is_dead:
            outcome.is_cut = True
            return
        if outcome.is_complete:
            raise Violated(f"{plan}: {message['type']} after the end of the answer")
        if message["type"] == "http.response.start":
            outcome.status = message["status"]
            return
        outcome.body += message.get("body", b"")
        self._pieces += 1
        outcome.is_complete = not message.get("more_body", False)
        if plan.leaves_after is not None and self._pieces >= plan.leaves_after and not outcome.is_complete:
            outcome.has_left = True
            if not self._left.done():
                self._left.set_result(None)
        elif plan.pause_s and self._pieces > 1:
            await asyncio.sleep(plan.pause_s * self.world.random.random())
        else:
            await asyncio.sleep(0)

    def leave(self) -> None:
        """Close the connection before any answer."""
        self.outcome.has_left = True
        if not self._left.done():
            self._left.set_result(None)

    # -- what was seen -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        outcome = self.outcome
        if outcome.status == 200 and self.plan.is_streamed:
            for line in bytes(outcome.body).decode().splitlines():
                if outcome.ends and line:
                    raise Violated(f"{self.plan}: {line!r} after the mark of the stream's end")
                if line == "data: [DONE]":
                    outcome.ends += 1
                elif line.startswith("data: {"):
                    self._read_chunk(json.loads(line[6:]))
        elif outcome.is_complete and outcome.body:
            self._read_whole(json.loads(outcome.body))

    def _read_chunk(self, chunk: dict[str, Any]) -> None:
        outcome = self.outcome
        if "error" in chunk:
            outcome.error = str(chunk["error"].get("code") or chunk["error"].get("type"))
            return
        if chunk.get("usage"):
            if outcome.completion_tokens is not None:
                raise Violated(f"{self.plan}: two usages")
            outcome.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            index, text = choice["index"], choice["delta"].get("content") or ""
            if text and index in outcome.finishes:
                raise Violated(f"{self.plan}: text after its end: {text!r}")
            outcome.texts[index] = outcome.texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                if index in outcome.finishes:
                    raise Violated(f"{self.plan}: two ends")
                outcome.finishes[index] = choice["finish_reason"]

    def _read_whole(self, body: dict[str, Any]) -> None:
        outcome = self.outcome
        if "error" in body:
            outcome.error = str(body["error"].get("code") or body["error"].get("type"))
            return
        for choice in body["choices"]:
            outcome.texts[choice["index"]] = choice["message"]["content"] or ""
            outcome.finishes[choice["index"]] = choice["finish_reason"]
        outcome.completion_tokens = body["usage"]["completion_tokens"]

    def check(self) -> None:
        """Check that the client has the model's answer, an error, or a part of the answer if it left."""
        plan, outcome = self.plan, self.outcome
        finishes = " ".join(outcome.finishes.values()) or None
        self.world.note(f"request {plan.number}: {outcome.status} {finishes} {outcome.error} {outcome.tokens}")
        if not self.is_allowed and (outcome.status == 200 or outcome.texts):
            raise Violated(f"{plan}: its key may not use its model, and gets {outcome.status} {outcome.texts}")
        answers = [plan.answer(choice) for choice in range(plan.choices)]
        for choice, text in outcome.texts.items():
            answer = text_of(answers[choice])
            if not answer.startswith(text):
                raise Violated(f"{plan}: the text {text!r} is not the model's answer {answer!r}")
            if choice in outcome.finishes and text != answer:
                raise Violated(f"{plan}: finished as {outcome.finishes[choice]} after {text!r} of {answer!r}")
        # A worker that cannot be started fails its requests with this code too.
        if outcome.error in ("internal_error", "internal") and not outcome.is_cut and "spawn" not in self.world.faults:
            raise Violated(f"{plan}: the gateway failed: {bytes(outcome.body)!r}")
        has_all = len(outcome.finishes) == plan.choices
        if has_all and outcome.completion_tokens not in (None, sent := sum(map(len, answers))):
            raise Violated(f"{plan}: {outcome.completion_tokens} tokens are counted, {sent} were sent")
        if not has_all and not (outcome.error or outcome.has_left or outcome.is_cut):
            raise Violated(f"{plan}: no end: {outcome}")
        is_whole = has_all and outcome.is_complete and not (outcome.error or outcome.has_left)
        if is_whole and plan.is_streamed and (not outcome.ends or outcome.completion_tokens is None):
            raise Violated(f"{plan}: its stream ends without its mark or its usage: {bytes(outcome.body[-300:])!r}")

    def check_time(self, limit_s: float) -> None:
        """Check that the request has ended by its limit. A client that reads slowly is sent the rest later."""
        if self.outcome.is_cut or self.plan.pause_s or self.world.jumped_at >= self._began_at:
            return
        took_s = self._loop.time() - self._began_at
        if took_s > limit_s:
            raise Violated(f"{self.plan}: it took {took_s:.1f} s, its limit is {limit_s:.1f} s")
