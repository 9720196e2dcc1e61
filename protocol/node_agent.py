"""Messages between a gateway and the agents of other nodes, over ZeroMQ with CURVE: orders down, answers up.

An order names a model, a rank and a reservation. It has neither a command nor a path nor an environment: those are the
agent's own. Each order but `Pulse` has the number of its call, and is answered by one message with that number.
A message is a msgpack array: an integer tag, then the fields in order. Fields are only ever appended, with a default.

A reservation is of the key that made it, under a number that this key has chosen, from `Reserve` to `Released`:
memory is waited for, held for a time, then committed; one process is spawned in it.
"""

from typing import Final

import msgspec

from protocol.codec import decode
from protocol.failures import Failure
from protocol.group import Versions

# How often a gateway says that it lives while it has reservations; an agent answers each with `Alive`.
PULSE_S: Final = 1.0


# -- orders ------------------------------------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask what the node is, and with `repository` and `form` whether it has that model."""

    call: int
    model: str = ""
    form: str = ""


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask for memory for one rank of a group. It is answered once the memory is there, however long that takes.

    What is not committed `ttl_s` after the grant is taken back. `model` is the path or repository that the gateway
    has it by, as a hint; `form` decides.
    """

    call: int
    reservation: int
    group: str
    model: str
    form: str
    rank: int
    size: int
    size_bytes: int
    ttl_s: float


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Keep the memory until `Release`: all other nodes of the group have granted theirs."""

    call: int
    reservation: int


class Spawn(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Start the rank's process, once. `spec` is the rank's specification as JSON, without a path."""

    call: int
    reservation: int
    spec: bytes


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Send a signal to the rank's process: SIGTERM, SIGABRT or SIGKILL."""

    call: int
    reservation: int
    signum: int


class Logs(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Ask for the end of the rank's output."""

    call: int
    reservation: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """End what runs, and give the memory back; also of a reservation that still waits for it."""

    call: int
    reservation: int


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The gateway lives. Without one for a while the agent ends what it has started for it."""


Order = Describe | Reserve | Commit | Spawn | Signal | Logs | Release | Pulse


# -- answers -----------------------------------------------------------------------------------------------------------


class Described(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The node as it is now. `form` is that of its own copy of the model asked about, empty where it has none."""

    call: int
    node: str
    boot: int
    versions: Versions
    platform: str
    budget_bytes: int
    free_bytes: int
    form: str = ""
    # Of its fabric: addresses of this machine, each with whether plain traffic may cross it.
    trusted_ips: tuple[str, ...] = ()
    # Names of backends that this build of MLX has.
    backends: tuple[str, ...] = ()


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The memory is held. `form` is that of the copy which the rank will load."""

    call: int
    size_bytes: int
    form: str


class Spawned(msgspec.Struct, frozen=True, array_like=True, tag=3):
    call: int
    pid: int


class Lines(msgspec.Struct, frozen=True, array_like=True, tag=4):
    call: int
    lines: list[str]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=5):
    call: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The order was not obeyed, and nothing has changed by it."""

    call: int
    failure: Failure


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The process of a reservation has ended; `status` as subprocess reports it. The memory is given back by itself."""

    reservation: int
    status: int
    lines: list[str] = []


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The agent lives, and has these reservations of the key that asks. A new `boot`: it has lost all earlier ones."""

    boot: int
    reservations: list[int] = []


Answer = Described | Reserved | Spawned | Lines | Done | Refused | Exited | Alive

_encoder: Final = msgspec.msgpack.Encoder()
_orders: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    return _encoder.encode(message)


def decode_order(frame: bytes) -> Order:
    """Raises `MalformedFrame`."""
    return decode(_orders, frame)


def decode_answer(frame: bytes) -> Answer:
    """Raises `MalformedFrame`."""
    return decode(_answers, frame)
