"""Stream at a peer: the sequences of one request, or one tokenize call, in one HTTP request.

The link treats a stream like a worker; each stream has its own epoch. If the connection is lost, or the peer cannot
serve a sequence, the sequence is parked, so that another place can resume it.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx
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
from protocol.to_worker import Abort, Detokenize, Down, Generate, Tokenize

log = logging.getLogger(__name__)

LOST: Final = "The peer that served this request was lost. Try again."
# These failures are of the peer or its worker, so another place may be able to serve the request.
PLACE_FAILURES: Final = frozenset(
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

# A request that a peer refused with one of these statuses is sent to no other peer: it is invalid, too large, or in a
# loop.
_FINAL_STATUSES: Final = (400, 413, 508)


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Parked sequences of a stream that has ended, and the failure to report if no other place can resume them."""

    stream: "PeerStream"
    sequences: list[Sequence]
    failure: Failure


# Called at most once, when the stream has ended.
OnLoss = Callable[[PeerLost], None]


class PeerStream:
    """`Runner` and `FrameSender` of one HTTP request, which contains all messages sent in one turn of the event loop.

    `name` is the model's name on this daemon, and `peer_model` its name at the peer.
    """

    def __init__(
        self,
        node: PeerNode,
        name: str,
        model: PeerModel,
        epoch: int,
        link: WorkerLink,
        tasks: TaskSet,
        on_loss: OnLoss,
        on_end: Callable[[], None],
        headers: dict[str, str],
    ) -> None:
        """Make a stream that has sent nothing yet. Raises `OSError` or `ValueError` if the peer's key
        cannot be read.
        """
        self.node = node
        self.name = name
        self.peer_model = model.name
        self.claims = PeerClaims(model)
        self.epoch = epoch
        self._secret = node.secret.encode()
        self._link = link
        self._tasks = tasks
        self._on_loss = on_loss
        self._headers = headers | {VIA_HEADER: str(link.boot)}
        self._frames: list[bytes] = []
        # The encoded tokenize or detokenize call, if the stream is for one.
        self._call = b""
        self._open: set[int] = set()
        self._parked: list[Sequence] = []
        # Maps request ids to prompt tokens. A sequence must have the same number of them at each place.
        self.prompt_tokens: dict[int, int] = {}
        self._failure: Failure | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_end = on_end
        link.attach(name, epoch, self._post, self._parked.append, self)

    # -- Runner ------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._task is None

    def refusal(self, request: Generate) -> Failure | None:
        return None

    def discard(self) -> None:
        """End a stream that has sent nothing."""
        self._link.detach(self.epoch)
        self._on_end()

    # -- FrameSender -------------------------------------------------------------------------------------------------

    def prepare(self, request: Generate) -> Generate:
        """Return the request for the peer. It has no tenant, and a keyed hash in place of the cache salt.

        The request always asks for progress, so that a peer in a long prefill is not considered lost.
        """
        self.claims.expect(request)
        salt = request.cache_salt
        if salt:
            salt = hmac.digest(self._secret, salt.encode(), "blake2b")[:16].hex()
        return replace(request, cache_salt=salt, tenant="", want_progress=True)

    def send(self, message: Down, frame: bytes) -> None:
        match message:
            case Abort(rids):
                self._abort(rids)
            case Generate(rid):
                self._begin(rid)
                self._frames.append(frame)
            case Tokenize(rid) | Detokenize(rid):
                self._begin(rid)
                self._call = frame
            case _:
                raise AssertionError(f"a peer accepts no {type(message).__name__}")

    def _post(self, report: object) -> None:
        raise AssertionError(f"a peer sends no {type(report).__name__}")

    def _begin(self, rid: int) -> None:
        assert self._task is None, "the HTTP request was sent"
        if not self._open:
            asyncio.get_running_loop().call_soon(self._start)
        self._open.add(rid)

    def _abort(self, rids: tuple[int, ...]) -> None:
        self._open.difference_update(rids)
        if not self._open and self._task is not None:
            # Cancelling the task closes the connection, and the peer then aborts the sequences.
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
            self.node.note_success()
        finally:
            self._finish()

    async def _exchange(self) -> None:
        if not self._open:
            return
        body = encode_request(self.peer_model, self._frames, self._call)
        reader = FrameReader(MAX_FRAME_BYTES if self._call else self.claims.frame_bytes)
        async with self.node.generate(body, self._headers) as response:
            async for data in response.aiter_raw():
                for message in reader.feed(data):
                    self._handle(message)
                self._link.wake_readers()
        if self._open:
            raise MalformedFrame("the answer ended before its sequences")

    def _handle(self, message: PeerUp) -> None:
        match message:
            case PeerAlive():
                pass
            case Step(deltas=deltas):
                for delta in deltas:
                    self.claims.check(delta)
                    if delta.finish is not None:
                        self._open.discard(delta.rid)
                if any(delta.failure is not None for delta in deltas):
                    message = replace(message, deltas=[self._parkable(delta) for delta in deltas])
                self._link.receive_from_peer(self.epoch, message)
            case Rejected(rid, failure):
                self._open.discard(rid)
                self._link.receive_from_peer(self.epoch, Rejected(rid, self._parkable_failure(failure)))
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

    def _parkable(self, delta: Delta) -> Delta:
        return delta if delta.failure is None else replace(delta, failure=self._parkable_failure(delta.failure))

    def _parkable_failure(self, failure: Failure) -> Failure:
        """Replace a failure of the peer by that of a lost worker, so that the link parks the sequence."""
        if failure.code not in PLACE_FAILURES:
            return failure
        self._failure = failure
        self.node.block(self.peer_model, BUSY_S if failure.is_retryable else ABSENT_S)
        return replace(failure, code=Code.WORKER_DIED)

    def _decline(self, error: PeerDeclined) -> None:
        self._failure = Failure(Code.DRAINING, LOST, str(error))
        if error.status in _FINAL_STATUSES:
            failure = Failure(Code.INTERNAL, f"The peer {self.node.name} does not take this request.", str(error))
            for rid in self._open:
                self._link.receive_from_peer(self.epoch, Rejected(rid, failure))
            self._open.clear()
        key_is_refused = error.status in (401, 403)
        pause_s = KEY_REFUSED_S if key_is_refused else BUSY_S if error.status in (429, 503) else ABSENT_S
        self.node.block(self.peer_model, pause_s)
        log.warning("peer %s does not serve %s: %s", self.node.name, self.peer_model, error)
        self.node.failures["key_refused" if key_is_refused else "declined"] += 1

    def _fail(self, reason: str, error: Exception) -> None:
        if not self._open and not self._parked:
            return
        log.warning("peer %s: %s of %s: %s", self.node.name, reason, self.name, str(error) or type(error).__name__)
        self._failure = Failure(Code.WORKER_DIED, LOST, str(error))
        self.node.note_failure(reason)

    def _finish(self) -> None:
        self._link.wake_readers()
        self._on_end()
        self._link.detach(self.epoch)
        lost = [sequence for sequence in self._parked if not sequence.is_over]
        if lost:
            failure = self._failure or Failure(Code.WORKER_DIED, LOST)
            self._on_loss(PeerLost(self, lost, failure))
