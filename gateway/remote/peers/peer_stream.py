"""The sequences of one request, or a question, at a peer: one HTTP request, whose answer is a stream of frames.

For the link it is a runner like a worker, whose epoch is the connection. What is lost with the connection, and what the
peer gives up, is handed back parked, to go on elsewhere.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec
from msgspec.structs import replace

from gateway.link.link import WorkerLink
from gateway.link.sequence import Sequence
from gateway.remote.peers.peer import ABSENT_S, BUSY_S, KEY_REFUSED_S, PeerDeclined, PeerNode
from gateway.remote.peers.validation import PeerClaims
from gateway.task_set import TaskSet
from protocol.codec import MAX_FRAME_BYTES, MalformedFrame
from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Progress, Rejected, Step, Tokenized
from protocol.peering import VIA_HEADER, FrameReader, PeerAlive, PeerModel, PeerUp, encode_request
from protocol.to_worker import Generate

log = logging.getLogger(__name__)

LOST: Final = "The peer that served this request was lost. Try again."
# Failures of the peer or of its worker, not of the request: it may do better elsewhere.
ELSEWHERE: Final = frozenset(
    {
        Code.BUSY,
        Code.ABORTED,
        Code.DRAINING,
        Code.WORKER_DIED,
        Code.MODEL_MISSING,
        Code.MODEL_CORRUPT,
        Code.MODEL_UNSUPPORTED,
        Code.OUT_OF_MEMORY,
        Code.LOAD_TIMEOUT,
        Code.BAD_CONFIG,
        Code.INCOMPATIBLE,
        Code.DOES_NOT_FIT,
    }
)

# Statuses of a request that no peer takes: it is not valid, too large, or has come back.
_FINAL: Final = (400, 413, 508)


# The beginnings of messages to a runner: a prompt is not read again to be sent on.
class _AbortHead(msgspec.Struct, frozen=True, array_like=True, tag=3):
    rids: tuple[int, ...]


class _GenerateHead(msgspec.Struct, frozen=True, array_like=True, tag=2):
    rid: int


class _TokenizeHead(msgspec.Struct, frozen=True, array_like=True, tag=5):
    rid: int


class _DetokenizeHead(msgspec.Struct, frozen=True, array_like=True, tag=15):
    rid: int


_heads: Final[msgspec.msgpack.Decoder[_AbortHead | _GenerateHead | _TokenizeHead | _DetokenizeHead]] = (
    msgspec.msgpack.Decoder(_AbortHead | _GenerateHead | _TokenizeHead | _DetokenizeHead)
)


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Sequences that a stream gave up, parked, and why: for its client if nothing else can be done."""

    stream: "PeerStream"
    sequences: list[Sequence]
    failure: Failure


# Told of a loss. Called once at most, when the stream has ended.
OnLoss = Callable[[PeerLost], None]


class PeerStream:
    """A `Runner` and its `FrameSender`. What is sent in one turn of the event loop goes as one request, in the next.

    `name` is the model's here, by which it is counted; `there` is its name at the peer.
    """

    def __init__(
        self,
        node: PeerNode,
        name: str,
        there: PeerModel,
        epoch: int,
        link: WorkerLink,
        tasks: TaskSet,
        on_loss: OnLoss,
        headers: dict[str, str],
    ) -> None:
        """Raises `OSError` or `ValueError` when the key of the peer cannot be read."""
        self.node = node
        self.name = name
        self.there = there.name
        # Of what it was asked for, all that it may say.
        self.claims = PeerClaims(there)
        self.epoch = epoch
        self._secret = node.secret.encode()
        self._link = link
        self._tasks = tasks
        self._on_loss = on_loss
        self._headers = headers | {VIA_HEADER: str(link.boot)}
        self._frames: list[bytes] = []
        self._question = b""
        self._open: set[int] = set()
        self._parked: list[Sequence] = []
        # Of the prompts, as another peer has counted them.
        self.prompt_tokens: dict[int, int] = {}
        self._failure: Failure | None = None
        self._task: asyncio.Task[None] | None = None
        # Told when it has ended, whatever of it was lost.
        self.on_end: Callable[[], None] = _nothing
        link.attach(name, epoch, self._post, self._parked.append, self)

    # -- a runner ----------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._task is None

    def refusal(self, request: Generate) -> Failure | None:
        return None

    def discard(self) -> None:
        """Forget it: nothing was sent by it, and nothing will be."""
        self._link.detach(self.epoch)
        self.on_end()

    # -- a frame sender ----------------------------------------------------------------------------------------------

    def prepare(self, request: Generate) -> Generate:
        """As the peer gets it: without our tenants, and with a salt from which ours cannot be told.

        It asks for progress: the silence of a long prefill must not look like death.
        """
        self.claims.expect(request)
        salt = request.cache_salt
        if salt:
            salt = hmac.digest(self._secret, salt.encode(), "blake2b")[:16].hex()
        return replace(request, cache_salt=salt, tenant="", want_progress=True)

    def send_frame(self, frame: bytes) -> None:
        match _heads.decode(frame):
            case _AbortHead(rids):
                self._abort(rids)
            case _GenerateHead(rid):
                self._begin(rid)
                self._frames.append(frame)
            case _TokenizeHead(rid) | _DetokenizeHead(rid):
                self._begin(rid)
                self._question = frame

    def _post(self, report: object) -> None:
        raise AssertionError(f"a peer sends no {type(report).__name__}")

    def _begin(self, rid: int) -> None:
        assert self._task is None, "a stream at a peer takes no more requests"
        if not self._open:
            asyncio.get_running_loop().call_soon(self._start)
        self._open.add(rid)

    def _abort(self, rids: tuple[int, ...]) -> None:
        self._open.difference_update(rids)
        if not self._open and self._task is not None:
            # Its client has left. The peer sees the connection close, and frees what it holds.
            self._task.cancel()

    # -- the connection ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._task = self._tasks.start(self._run(), f"stream of {self.name} at peer {self.node.name}")

    async def _run(self) -> None:
        try:
            await self._exchange()
        except PeerDeclined as error:
            self._decline(error)
        except (httpx.HTTPError, TimeoutError) as error:
            self._fail("timeout" if isinstance(error, TimeoutError | httpx.TimeoutException) else "connection", error)
        except (MalformedFrame, OSError, ValueError) as error:
            self._fail("malformed", error)
        else:
            self.node.served()
        finally:
            self._finish()

    async def _exchange(self) -> None:
        if not self._open:
            return
        body = encode_request(self.there, self._frames, self._question)
        reader = FrameReader(MAX_FRAME_BYTES if self._question else self.claims.frame_bytes)
        async with self.node.generate(body, self._headers) as response:
            async for data in response.aiter_raw():
                for message in reader.feed(data):
                    self._take(message)
                self._link.wake_readers()
        if self._open:
            raise MalformedFrame("the answer ended before its sequences")

    def _take(self, message: PeerUp) -> None:
        match message:
            case PeerAlive():
                pass
            case Step(deltas=deltas):
                for delta in deltas:
                    self.claims.check(delta)
                    if delta.finish is not None:
                        self._open.discard(delta.rid)
                if any(delta.failure is not None for delta in deltas):
                    message = replace(message, deltas=[self._redirected(delta) for delta in deltas])
                self._link.receive_from_peer(self.epoch, message)
            case Rejected(rid, failure):
                self._open.discard(rid)
                self._link.receive_from_peer(self.epoch, Rejected(rid, self._elsewhere(failure)))
            case Accepted(rid, prompt_tokens):
                self.claims.check_accepted(message)
                if self.prompt_tokens.setdefault(rid, prompt_tokens) != prompt_tokens:
                    raise MalformedFrame("its model reads the prompt as other tokens: it is not the same model")
                self._link.receive_from_peer(self.epoch, message)
            case Progress():
                self.claims.check_progress(message)
                self._link.receive_from_peer(self.epoch, message)
            case Tokenized(rid, count):
                if not 0 <= count <= MAX_FRAME_BYTES:
                    raise MalformedFrame("its count of tokens is out of range")
                self._open.discard(rid)
                self._link.receive_from_peer(self.epoch, message)

    def _redirected(self, delta: Delta) -> Delta:
        return delta if delta.failure is None else replace(delta, failure=self._elsewhere(delta.failure))

    def _elsewhere(self, failure: Failure) -> Failure:
        """A failure of the peer's parks the sequence, as the death of a worker does."""
        if failure.code not in ELSEWHERE:
            return failure
        self._failure = failure
        self.node.block(self.there, BUSY_S if failure.is_retryable else ABSENT_S)
        return replace(failure, code=Code.WORKER_DIED)

    def _decline(self, error: PeerDeclined) -> None:
        self._failure = Failure(Code.DRAINING, LOST, str(error))
        if error.status in _FINAL:
            failure = Failure(Code.INTERNAL, f"The peer {self.node.name} does not take this request.", str(error))
            for rid in self._open:
                self._link.receive_from_peer(self.epoch, Rejected(rid, failure))
            self._open.clear()
        key_is_refused = error.status in (401, 403)
        s = KEY_REFUSED_S if key_is_refused else BUSY_S if error.status in (429, 503) else ABSENT_S
        self.node.block(self.there, s)
        log.warning("peer %s does not serve %s: %s", self.node.name, self.there, error)
        self.node.failures["key_refused" if key_is_refused else "declined"] += 1

    def _fail(self, reason: str, error: Exception) -> None:
        if not self._open and not self._parked:
            return
        log.warning("peer %s: %s of %s: %s", self.node.name, reason, self.name, str(error) or type(error).__name__)
        self._failure = Failure(Code.WORKER_DIED, LOST, str(error))
        self.node.failed(reason)

    def _finish(self) -> None:
        self._link.wake_readers()
        self.on_end()
        self._link.detach(self.epoch)
        lost = [sequence for sequence in self._parked if not sequence.is_over]
        if lost:
            failure = self._failure or Failure(Code.WORKER_DIED, LOST)
            self._on_loss(PeerLost(self, lost, failure))


def _nothing() -> None:
    pass
