"""Messages between the ranks of a group: one model that several processes run together, each with a part of it.

Rank 0 is an ordinary worker to its gateway. It decides all that hangs on a clock, a thread, bytes or a client, and
says it in a `TickPlan` before each tick; the others, its followers, replay the plan on their parts. Two connections
join a follower to rank 0, which binds both: the *plan*, between the two engine threads, and the *watch*, between
threads that no engine can block. Both are CURVE over TCP, with keys that the gateway makes for each start. All ranks
are of one version of mlxd, which `JoinGroup` says and rank 0 checks, so that fields may change between versions.

Plan: `JoinGroup` up, `StartLoading` down, `RankLoaded` up, then `TickPlan` down and `PlanDone` up for each, with a
`RankMemory` before it where there is a `GroupShare` in it. Watch: `RankHeartbeat` both ways, `GroupStopped` down and
`RankFailed` up.
"""

from typing import Final

import msgspec

from protocol.codec import decode
from protocol.failures import Failure

# Routing id of a follower on both connections: its rank.
RANK_BYTES: Final = 2


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """Versions that must be the same on all ranks: numbers and the order of collectives follow from them."""

    mlxd: str
    mlx: str
    mlx_lm: str


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A follower is there. `form` is a digest of its model's files and of what changes its numbers.

    `links` are the addresses `ip:port` at which it will listen for a ring, and `devices` its RDMA devices by rank.
    """

    epoch: int
    rank: int
    pid: int
    host: str
    versions: Versions
    form: str
    device: str = ""
    free_bytes: int = 0
    links: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


class StartLoading(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All have joined: connect by `backend`, then load. `links` are those of all ranks; `split` are layers by rank."""

    backend: str
    parallel: str
    links: tuple[tuple[str, ...], ...] = ()
    devices: tuple[tuple[str, ...], ...] = ()
    coordinator: str = ""
    split: tuple[int, ...] = ()


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A follower's part is in memory. `needs_checkpoints`: some of its layers go on at checkpoints only."""

    rank: int
    shard_bytes: int
    seconds: float
    needs_checkpoints: bool


# -- operations, in the order in which rank 0 has done them ----------------------------------------------------------


class BeginGroup(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """A new batch without rows, on a new prefix cache of so many bytes."""

    lane: str
    cache_bytes: int
    needs_checkpoints: bool


class InsertRow(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """A row enters the batch. Rank 0 has found `reused` of its tokens in its prefix cache: a follower must as well.

    `top` is how many likeliest tokens of each position of its prompt are wanted; None where none is scored.
    """

    rid: int
    prompt: list[int]
    output: list[int]
    max_tokens: int
    reused: int
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    boundaries: list[int] = []
    salt: str = ""
    top: int | None = None


class RemoveRow(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A row leaves the batch before its end; what it has computed goes to the prefix cache."""

    rid: int


class ResizeCache(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Another budget of the prefix cache. Where `token_bytes` is not 0, cached prefixes count as so much a token and a
    checkpoint, with so many arrays, whatever their part on a rank takes."""

    cache_bytes: int
    token_bytes: int = 0
    state_bytes: int = 0
    arrays: int = 0


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Nothing that was computed before is reused."""


class SettleMemory(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Rows that have ended are stored."""


class GroupShare(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Another share of memory for the ranks of rank 0's host, as in `SetMemory`. Answered by `RankMemory`."""

    share_bytes: int
    kv_part: float = 1.0
    cache_part: float = 1.0


class LeaveGroup(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The group ends. A follower answers with `PlanDone`, and exits."""


Op = BeginGroup | InsertRow | RemoveRow | ResizeCache | ClearCache | SettleMemory | GroupShare | LeaveGroup


class TickPlan(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Operations, then a tick with at most `chunk` tokens of each prompt; 0 is no tick.

    `crc` is of all that was generated up to the plan before: a follower that has another one must not run this one.
    """

    seq: int
    crc: int
    ops: list[Op] = []
    chunk: int = 0
    rides: bool = True


class PlanDone(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A plan was done. `crc` is of all rids and ids that were generated up to now."""

    rank: int
    seq: int
    crc: int
    step_us: int = 0
    memory: int = 0


class RankMemory(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Memory of a rank: KV bytes of one sequence by its length, and the room that it has for KV and for prefixes.

    `windows` are bytes per token up to so many; `widest` is the layer with the most bytes per token; `arrays` are those
    of a cached prefix with a checkpoint. `limit` is what MLX may allocate.
    """

    rank: int
    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    fixed_bytes: int
    widest: int
    arrays: int
    kv_bytes: int
    prefix_bytes: int
    limit: int = 0


class RankHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A sign of life several times a second, with the newest plan that was begun and the newest that was done.

    `cpu_s` is the CPU time of the process since it began the plan that runs.
    """

    rank: int
    begun: int = 0
    done: int = 0
    cpu_s: float = 0.0


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The last message of a follower that cannot go on. `status` is what it exits with."""

    rank: int
    status: int
    failure: Failure


class GroupStopped(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Rank 0 has stopped the group: its end is no loss. Said in place of `RankHeartbeat`, until all have answered
    `LeaveGroup`.
    """


Down = StartLoading | TickPlan
Up = JoinGroup | RankLoaded | PlanDone | RankMemory
Watch = RankHeartbeat | RankFailed | GroupStopped

_encoder: Final = msgspec.msgpack.Encoder()
_down: Final[msgspec.msgpack.Decoder[Down]] = msgspec.msgpack.Decoder(Down)
_up: Final[msgspec.msgpack.Decoder[Up]] = msgspec.msgpack.Decoder(Up)
_watch: Final[msgspec.msgpack.Decoder[Watch]] = msgspec.msgpack.Decoder(Watch)


def encode(message: Down | Up | Watch) -> bytes:
    return _encoder.encode(message)


def decode_down(frame: bytes) -> Down:
    """Raises `MalformedFrame`."""
    return decode(_down, frame)


def decode_up(frame: bytes) -> Up:
    """Raises `MalformedFrame`."""
    return decode(_up, frame)


def decode_watch(frame: bytes) -> Watch:
    """Raises `MalformedFrame`."""
    return decode(_watch, frame)


def identity(rank: int) -> bytes:
    """The routing id of a follower."""
    return rank.to_bytes(RANK_BYTES, "big")
