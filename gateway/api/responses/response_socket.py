"""A WebSocket at `/v1/responses`: the client's messages, its streams, and the end of the connection."""

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from msgspec import UNSET, Raw
from starlette.types import Scope
from websockets.frames import CloseCode

from gateway.api.responses import response as out
from gateway.api.responses.socket_turn import (
    KINDS,
    ClientEvent,
    ConversationMemory,
    RequiredOutput,
    SocketExchange,
    SocketHistory,
    SocketTurn,
    SteerAccepted,
    SteerErrorInfo,
    SteerFailed,
    SteerInput,
    SteerPending,
    SteerTarget,
    UncommittedSteer,
    decode_event,
    decode_steer,
    error_event,
    input_of,
    messages_of,
)
from gateway.errors import (
    BUSY_RETRY_AFTER_S,
    DRAIN_RETRY_AFTER_S,
    FULL_RETRY_AFTER_S,
    ApiError,
    BadRequest,
    Cancelled,
    Overloaded,
    Unavailable,
    invalid_choice,
)
from gateway.http.websocket import GuardedWebSocket, IncomingMessage, websocket_of
from gateway.request.record import record_of
from gateway.services import Services

# OpenAI's limits of one connection.
RUNNING_MAX: Final = 16
NAMED_STREAMS_MAX: Final = 32
AGE_MAX_S: Final = 3600.0
# Requests that wait for their turn.
WAITING_MAX: Final = 64
# Conversations of all WebSockets take at most this part of the memory for request bodies.
MEMORY_PART: Final = 4
# Inputs that steer one response.
STEERS_MAX: Final = 16


@dataclass(slots=True)
class SocketStream:
    """A stream of a WebSocket: its responses are generated one after the other."""

    name: str
    running: SocketTurn | None = None
    queue: deque[SocketTurn] = field(default_factory=deque[SocketTurn])
    # Steering that waits for the output of tools, by the id of the response that called them.
    steering: dict[str, list[SteerInput]] = field(default_factory=dict[str, list[SteerInput]])
    # The response that ended last.
    newest: str | None = None


class ResponseSocket:
    """One connection, from its handshake to its end. Each response is a request to the whole app."""

    def __init__(self, services: Services, memory: ConversationMemory, scope: Scope) -> None:
        record = record_of(scope)
        self._services = services
        self._scope = scope
        self._record = record
        self._socket: GuardedWebSocket = websocket_of(scope)
        self._history = SocketHistory(memory, record.caller.key or "")
        self._streams: dict[str, SocketStream] = {}
        self._requests = 0
        self._running = 0
        # Set once the client has left.
        self._left = asyncio.Event()
        # Whether the connection is closed when no response runs any more.
        self._is_ending = False
        self._is_expired = False
        self._tasks: asyncio.TaskGroup

    async def run(self) -> None:
        """Serve the client until the connection is closed. Raises `ClientLeft` before the handshake is done."""
        record, loop = self._record, asyncio.get_running_loop()
        headers = [(b"x-request-id", record.id.encode()), *record.always]
        await self._socket.accept(record.caller.key or "", headers)
        record.status = 101
        expiry: asyncio.TimerHandle | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                expiry = loop.call_later(AGE_MAX_S, self.expire)
                while (message := await self._socket.next_message()) is not None:
                    await self._receive(message)
                self._left.set()
        finally:
            if expiry is not None:
                expiry.cancel()
            self._history.close()
            for stream in self._streams.values():
                for turn in stream.queue:
                    _release(turn)

    def end(self) -> None:
        """Close the connection once no response runs. Call it when the server ends."""
        self._is_ending = True
        if not self._left.is_set():
            self._tasks.create_task(self._close_if_idle())

    def expire(self) -> None:
        """Refuse further responses, because the connection has reached its maximum age, and end it."""
        self._is_expired = True
        if self._left.is_set():
            return
        self._tasks.create_task(self._send_error(_expired(), None))
        self.end()

    async def _receive(self, message: IncomingMessage) -> None:
        stream_id: str | None = None
        try:
            if message.text is None:
                raise BadRequest("Binary messages are not supported: send JSON as text.", code="invalid_event")
            event, data = await self._services.bodies.work(len(message.text), decode_event, message.text)
            stream_id = event.stream_id
            match event.type:
                case "response.create":
                    self._create(event, data, message)
                    return
                case "response.steer":
                    await self._steer(event, data)
                case "response.cancel":
                    self._cancel(event)
                case kind:
                    raise invalid_choice(kind, KINDS, "type")
        except ApiError as error:
            await self._send_error(error, stream_id)
        message.lease.close()

    # -- responses ---------------------------------------------------------------------------------------------------

    def _create(self, event: ClientEvent, data: bytes, message: IncomingMessage) -> None:
        """Queue a response. Raises `ApiError`."""
        name = event.stream_id or ""
        if self._is_expired:
            raise _expired()
        if sum(len(stream.queue) for stream in self._streams.values()) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} requests of this WebSocket wait already.", BUSY_RETRY_AFTER_S)
        stream = self._streams.get(name)
        if stream is None:
            if name and len(self._streams.keys() - {""}) >= NAMED_STREAMS_MAX:
                text = f"A WebSocket has at most {NAMED_STREAMS_MAX} streams: use one again, or open another WebSocket."
                raise BadRequest(text, "stream_id", "websocket_stream_limit_reached")
            stream = self._streams[name] = SocketStream(name)
        must_wait = stream.running is not None or stream.queue or self._running >= RUNNING_MAX
        if must_wait and not message.lease.hold(max(0, len(data) - message.lease.size_bytes)):
            reason = "The bodies of waiting requests fill their memory."
            raise Unavailable(reason, FULL_RETRY_AFTER_S, "body_memory_full")
        stream.queue.append(
            SocketTurn(
                name, data, message.lease, self._history, stream.steering, event.previous_response_id, self._find
            )
        )
        self._start_next()

    def _start_next(self) -> None:
        for stream in self._streams.values():
            if stream.running is None and stream.queue and self._running < RUNNING_MAX and not self._left.is_set():
                self._running += 1
                stream.running = stream.queue.popleft()
                self._socket.mark(is_busy=True)
                self._tasks.create_task(self._run(stream, stream.running))

    async def _run(self, stream: SocketStream, turn: SocketTurn) -> None:
        exchange = SocketExchange(self._socket, turn, self._left)
        self._requests += 1
        scope = exchange.scope(self._scope, f"{self._record.id}.{self._requests}")
        # The request reserves the memory of its body itself.
        _release(turn)
        await self._scope["app"](scope, exchange.receive, exchange.send)
        exchange.close()
        stream.running = None
        self._running -= 1
        stream.newest = turn.response_id or stream.newest
        if not self._left.is_set():
            await self._finish(stream, turn, exchange)
        self._start_next()
        await self._close_if_idle()

    async def _finish(self, stream: SocketStream, turn: SocketTurn, exchange: SocketExchange) -> None:
        last = None if turn.run is None else turn.run.last
        if last is None or last.status == "failed":
            self._history.evict(stream.name, turn.previous)
        if exchange.refusal and turn.is_cancelled and turn.encoder is not None:
            # It was cancelled before its first event.
            events = turn.encoder.begin(0) + turn.encoder.error(Cancelled())
            answer = SocketExchange(self._socket, turn, self._left)
            for piece in turn.encoder.slices(events, answer) or (events,):
                await answer.send_events(piece)
        elif exchange.refusal:
            await self._refuse(turn, exchange)
        elif not exchange.is_complete:
            # The stream was cut off, because the client does not read it.
            self._socket.drop("write_timeout")
        elif turn.steers:
            await self._continue(stream, turn)

    async def _refuse(self, turn: SocketTurn, exchange: SocketExchange) -> None:
        """Send why a response was not begun. Steering that it should have committed waits on or is given back."""
        await self._socket.send_text([exchange.refusal])
        if turn.waited:
            turn.waiting[turn.previous or ""] = turn.waited
        for steer in turn.carried:
            error = SteerErrorInfo("successor_creation_failed", "The response with this input could not be created.")
            await self._send_steer_failure(turn, turn.previous or "", steer.sent, error, steer.id)

    async def _close_if_idle(self) -> None:
        if self._running == 0:
            self._socket.mark(is_busy=False)
            if self._is_ending:
                await self._socket.close(CloseCode.GOING_AWAY, "The server closes this WebSocket: open another one.")

    def _cancel(self, event: ClientEvent) -> None:
        """Cancel the response with the event's `response_id`, or the one that its stream generates. Raises
        `ApiError`.
        """
        for stream in self._streams.values():
            turn = stream.running
            by_stream = event.response_id is None and stream.name == (event.stream_id or "")
            if turn is not None and (by_stream or turn.response_id == event.response_id is not None):
                turn.cancel()
                return
        wanted = "of this stream" if event.response_id is None else f"with id {event.response_id[:100]!r}"
        raise ApiError(404, f"No response {wanted} is being generated on this WebSocket.", code="response_not_found")

    # -- steering ----------------------------------------------------------------------------------------------------

    async def _steer(self, event: ClientEvent, data: bytes) -> None:
        """Take new input for a running response. What is wrong with it is a `response.steer.failed`."""
        target = event.previous_response_id or ""
        turn = self._find(target)
        try:
            items, sent = await self._services.bodies.work(len(data), decode_steer, data)
        except BadRequest as error:
            await self._send_steer_failure(turn, target, input_of(data), SteerErrorInfo("invalid_input", error.message))
            return
        # The response may have ended meanwhile.
        turn = self._find(target)
        if turn is None or turn.run is None or turn.encoder is None or turn.run.last is not None:
            await self._send_steer_failure(turn, target, sent, self._not_running(target))
            return
        if len(turn.steers) >= STEERS_MAX:
            message = f"{STEERS_MAX} inputs for this response wait already."
            await self._send_steer_failure(turn, target, sent, SteerErrorInfo("too_many_pending_steers", message))
            return
        steer = SteerInput(f"steer_{secrets.token_hex(16)}", sent, items)
        turn.steers.append(steer)
        accepted = turn.encoder.note(SteerAccepted(SteerTarget(steer.id, target)))
        await self._socket.send_text(list(messages_of(accepted, turn.stream)))
        turn.run.steer()

    def _find(self, response_id: str) -> SocketTurn | None:
        running = (stream.running for stream in self._streams.values() if stream.running is not None)
        return next((turn for turn in running if turn.response_id == response_id), None)

    def _not_running(self, response_id: str) -> SteerErrorInfo:
        if any(stream.newest == response_id for stream in self._streams.values()):
            return SteerErrorInfo("response_already_completed", "The response has ended: continue it with its id.")
        message = f"No response with id {response_id[:100]!r} is being generated on this WebSocket."
        return SteerErrorInfo("response_not_found", message)

    async def _continue(self, stream: SocketStream, turn: SocketTurn) -> None:
        """Go on with the steering of a response that has ended: by a response that follows it, or once the client has
        run its tools.
        """
        assert turn.run is not None
        assert turn.encoder is not None
        assert turn.run.last is not None
        target = turn.run.response.id
        if turn.run.last.status not in ("completed", "incomplete"):
            error = SteerErrorInfo("response_not_active", "The response was cancelled or has failed.")
            for steer in turn.steers:
                await self._send_steer_failure(turn, target, steer.sent, error, steer.id)
        elif calls := turn.run.output.calls():
            stream.steering[target] = turn.steers
            required = [_required(call) for call in calls]
            for steer in turn.steers:
                pending = turn.encoder.note(SteerPending(SteerTarget(steer.id, target), required))
                await self._socket.send_text(list(messages_of(pending, turn.stream)))
        else:
            data = await self._services.bodies.work(turn.run.request_bytes, turn.successor)
            successor = SocketTurn(
                stream.name, data, None, self._history, stream.steering, target, self._find, turn.steers
            )
            stream.queue.appendleft(successor)

    async def _send_steer_failure(
        self, turn: SocketTurn | None, target: str, sent: Raw, error: SteerErrorInfo, steer_id: str | None = None
    ) -> None:
        event = SteerFailed(UncommittedSteer(target, sent, UNSET if steer_id is None else steer_id), error)
        encoder = None if turn is None else turn.encoder
        events = out.stream_bytes([event], 0)[0] if encoder is None else encoder.note(event)
        await self._socket.send_text(list(messages_of(events, "" if turn is None else turn.stream)))

    async def _send_error(self, error: ApiError, stream_id: str | None) -> None:
        await self._socket.send_text([error_event(error, stream_id)])


class ResponseSockets:
    """The open WebSockets of this API."""

    def __init__(self, services: Services) -> None:
        self._services = services
        bodies = services.bodies
        self._memory = ConversationMemory(bodies.lease, lambda: bodies.largest_bytes() // MEMORY_PART)
        self._open: set[ResponseSocket] = set()
        services.metrics.websockets = lambda: len(self._open)

    async def serve(self, scope: Scope) -> None:
        """Serve one connection until it is closed. Raises `ApiError` before its handshake is done."""
        if self._services.admission.is_draining:
            raise Unavailable("The server is shutting down.", DRAIN_RETRY_AFTER_S, "draining")
        socket = ResponseSocket(self._services, self._memory, scope)
        self._open.add(socket)
        try:
            await socket.run()
        finally:
            self._open.discard(socket)

    def end(self) -> None:
        """Close each connection once no response runs on it."""
        for socket in self._open:
            socket.end()


def _release(turn: SocketTurn) -> None:
    if turn.lease is not None:
        turn.lease.close()


def _required(call: out.FunctionCall | out.CustomToolCall) -> RequiredOutput:
    if isinstance(call, out.FunctionCall):
        return RequiredOutput("function_call_output", call.call_id, call.name)
    return RequiredOutput("custom_tool_call_output", call.call_id)


def _expired() -> BadRequest:
    message = f"A WebSocket is served for {AGE_MAX_S / 60:g} minutes: open another one."
    return BadRequest(message, code="websocket_connection_limit_reached")
