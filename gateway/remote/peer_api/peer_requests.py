"""`/internal/`: requests of other mlxd daemons, as messages of the protocol. They are never forwarded.

Only keys of role `peer` are admitted. What the dialects' decoders guarantee is checked here, because a peer may have
another version or be malicious.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.common import serve
from gateway.api.common.structure import check_msgpack
from gateway.config.settings import ModelConfig
from gateway.errors import TABLE, ApiError, BadRequest, Cancelled
from gateway.http.exchange import send_body
from gateway.http.request_body import read_body
from gateway.http.sse import StreamTiming, cut_off, respond_stream
from gateway.remote.peer_api.peer_problems import media_of, problems
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.codec import BYTES_PER_TOKEN, MAX_FRAME_BYTES, MalformedFrame, pack
from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Rejected, Step
from protocol.minors import MAJOR, MINOR
from protocol.peering import (
    GENERATE_PATH,
    STATUS_PATH,
    VIA_HEADER,
    PeerAlive,
    PeerModel,
    PeerRequest,
    PeerStatus,
    decode_request,
    encode_status,
    frame,
)
from protocol.prompts import ChatPrompt
from protocol.to_worker import Detokenize, Generate, Tokenize

# The first frame is sent immediately, because peers have short time-outs.
STREAM_TIMING: Final = StreamTiming(hold_s=0.0, keepalive_s=1.0)
FRAMES: Final = b"application/vnd.mlxd.frames"
MSGPACK: Final = b"application/msgpack"
_CODES: Final = {answer.code: code for code, answer in TABLE.items()}


def routes(services: Services) -> list[Route]:
    return [
        Route(STATUS_PATH, StatusForPeers(services), methods=["GET"]),
        Route(GENERATE_PATH, GenerateForPeers(services), methods=["POST"]),
    ]


class StatusForPeers:
    """`GET /internal/status`: the models of this daemon that the key may use, and their load."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, caller = self._services, record_of(scope).caller
        models = caller.usable(services.config.models.values())
        await services.fleet.forms.refresh(services.config.models.values())
        status = PeerStatus(
            services.config.server.node_name,
            services.link.boot,
            protocol.__version__,
            MAJOR,
            MINOR,
            services.admission.takes_none,
            [self._model(services.router.resolve_here(model.name, caller)) for model in models],
        )
        await send_body(send, 200, encode_status(status), kind=MSGPACK)

    def _model(self, model: ModelConfig) -> PeerModel:
        services = self._services
        load = services.meter.read(model)
        ready = services.pool.worker(model.name).ready
        return PeerModel(
            model.name,
            model.aliases,
            services.fleet.forms.known(model),
            str(load.state),
            # The local path must not be disclosed, and adapters are not offered to peers.
            None if ready is None else replace(ready, model_path="", adapters=()),
            model.context,
            load.inside,
            model.slots,
            model.slots + model.max_waiting,
            load.wait_s,
            load.load_s,
            load.prefill_rate,
            load.backlog_tokens,
            msgspec.to_builtins(model.sampling),
            msgspec.to_builtins(model.thinking),
        )


class GenerateForPeers:
    """`POST /internal/generate`: a `PeerRequest`. Responds with a stream of frames, or an error status."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        if str(services.link.boot) in Headers(scope=scope).getlist(VIA_HEADER):
            raise ApiError(508, "This request has come from this daemon.", code="loop_detected")
        body = await read_body(scope, receive, MAX_FRAME_BYTES)
        try:
            request = await services.bodies.work(len(body), _decoded, body)
        except MalformedFrame as error:
            raise BadRequest(f"The body is no request of a peer: {error}.") from None
        model = services.router.resolve_here(request.model, record.caller)
        if model.adapter:
            raise BadRequest(f"{model.full_name!r} is an adapter: adapters are not served to peers.", "model")
        record.model, record.stream = model.name, True
        if request.call is not None:
            await self._answer(model, request.call, record, receive, send)
        else:
            await self._generate(model, request.generates, record, receive, send)

    async def _answer(
        self, model: ModelConfig, call: Tokenize | Detokenize, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        async with cut_off(record, receive):
            estimate = record.body_bytes / BYTES_PER_TOKEN
            answer = await serve.call_worker(
                self._services, record, model, estimate, lambda rid: replace(call, rid=rid)
            )
            await send_body(send, 200, frame(replace(answer, rid=call.rid)), kind=FRAMES)

    async def _generate(
        self, model: ModelConfig, asked: list[Generate], record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        services = self._services
        assert record.media_lease is not None, "the middleware makes one for each request"
        record.media_lease.owner = record.caller.key or ""
        record.media_lease.grow(sum(len(each.data) for each in media_of(asked)))
        own = await services.bodies.work(record.body_bytes, _prepared, asked, services.link.next_rid)
        if asked and isinstance(asked[0].prompt, ChatPrompt):
            media = asked[0].prompt.media
            record.media = tuple(replace(each, data=b"") for each in media)
            record.media_bytes = sum(len(each.data) for each in media)
        encoder = PeerStreamEncoder([each.rid for each in asked])
        with Generation(services, model, own, record, encoder.bind, stays_here=True) as generation:
            encoder.generation = generation
            write_timeout_s = services.config.server.write_timeout_s
            try:
                await respond_stream(generation, encoder, record, receive, send, write_timeout_s, STREAM_TIMING, FRAMES)
            except ApiError as error:
                # A failure after the admission is sent as a frame, even if it is the first.
                record.outcome = error.outcome
                await send_body(send, 200, encoder.error(error), kind=FRAMES)


class PeerStreamEncoder:
    """Encoder of a stream to a peer. It replaces this daemon's request ids (rids) by the peer's."""

    def __init__(self, theirs: Sequence[int]) -> None:
        self._theirs = theirs
        self._by_own: dict[int, int] = {}
        self._open = set(theirs)
        self._accepted: set[int] = set()
        self._steps = 0
        self.generation: Generation | None = None

    def bind(self, rids: Sequence[int]) -> None:
        self._by_own = dict(zip(rids, self._theirs, strict=True))

    def begin(self, prompt_tokens: int) -> bytes:
        return self.keepalive()

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        if not deltas:
            return b""
        named = [replace(delta, rid=self._by_own[delta.rid]) for delta in deltas]
        self._open.difference_update(delta.rid for delta in named if delta.finish is not None)
        self._steps += 1
        accepted = b"" if len(self._accepted) == len(self._theirs) else self._acceptance()
        return accepted + frame(Step(0, self._steps, named))

    def keepalive(self) -> bytes:
        """Encode news about the prompts, or `PeerAlive` if there is none."""
        return self._acceptance() + self._progress() or frame(PeerAlive())

    def error(self, error: ApiError) -> bytes:
        failure = _failure(error)
        return b"".join(frame(Rejected(rid, failure)) for rid in self._theirs if rid in self._open)

    def end(self) -> bytes:
        return b""

    def _acceptance(self) -> bytes:
        generation, data = self.generation, b""
        if generation is None:
            return data
        for rid, tokens in generation.accepted.items():
            if rid not in self._accepted:
                self._accepted.add(rid)
                data += frame(Accepted(self._by_own[rid], tokens, generation.relaxed, generation.left_out))
        return data

    def _progress(self) -> bytes:
        generation = self.generation
        if generation is None or generation.progress is None or generation.record.first_token_s is not None:
            return b""
        known = generation.cached.items()
        return b"".join(
            frame(replace(generation.progress, rid=self._by_own[rid], cached=cached)) for rid, cached in known
        )


def _failure(error: ApiError) -> Failure:
    """Turn an error into the failure that the peer's gateway expects."""
    if isinstance(error, Cancelled):
        # The operator has cancelled the request, so the peer must not try another daemon.
        return Failure(Code.INVALID_REQUEST, error.message)
    unknown = Code.DRAINING if error.status in (429, 503) else Code.INTERNAL
    return Failure(_CODES.get(error.code or "", unknown), error.message, "", error.param, error.numbers)


def _decoded(body: bytes) -> PeerRequest:
    check_msgpack(body)
    return decode_request(body)


def _prepared(asked: list[Generate], next_rid: Callable[[], int]) -> list[Generate]:
    """Check the sequences and return copies with request ids of this daemon. Raises `BadRequest`."""
    problem = next(problems(asked), "")
    if problem:
        raise BadRequest(f"The peer's request is not valid: {problem}.")
    return pack([replace(each, rid=next_rid(), want_progress=True) for each in asked])
