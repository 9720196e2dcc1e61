"""The version before, as what it left behind: a state file of commit `e954cef`, and frames as long as its golden ones.

Nothing here comes from `protocol`, which is this version's.
"""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil
import zmq

from tests.support.scale import patient

FRAMES: Final = Path(__file__).parents[1] / "protocol" / "golden" / "v1.0.json"
WELCOME, GENERATE, DETOKENIZE, PING, DRAIN, SHUTDOWN = 1, 2, 15, 6, 7, 13
HELLO, READY, ACCEPTED, TOKENIZED, STEP, PONG, DRAINED, GOODBYE = 32, 34, 35, 44, 37, 40, 41, 42
TEXT_PROMPT, LENGTH = 2, 1
# It read no specification with a field beyond these.
SPEC: Final[dict[str, Any]] = {
    "name": "a", "path": "demo", "epoch": 1, "down": "ipc:///home/me/.mlxd/run/d.sock",
    "up": "ipc:///home/me/.mlxd/run/u.sock", "dtype": "auto", "context": 0, "max_running": 16, "max_waiting": 1048576,
    "prefill_chunk": 512, "trust_remote_code": False, "orphan_grace_s": 30.0, "orphan_max_s": 300.0,
    "log_level": "info", "cache_bytes": -1, "kv_bytes": -1, "parser": "",
    "disk_cache_dir": "/home/me/.mlxd/cache/prefix", "disk_cache_bytes": 10737418240, "disk_cache_tokens": 512,
    "memory_bytes": 11831945651, "chat_template": "",
}  # fmt: skip


def _shapes() -> dict[int, list[Any]]:
    golden = json.loads(FRAMES.read_bytes())
    frames = [msgspec.msgpack.decode(base64.b64decode(frame)) for frame in golden["down"] + golden["up"]]
    return {frame[0]: frame for frame in frames}


SHAPES: Final = _shapes()
STATS: Final = [0] * len(SHAPES[PONG][3])


def encode(tag: int, *fields: Any) -> bytes:
    """A message as long as that version sent it."""
    assert len(fields) == len(SHAPES[tag]) - 1, f"message {tag} had {len(SHAPES[tag]) - 1} fields"
    return msgspec.msgpack.encode([tag, *fields])


def decode(frame: bytes) -> list[Any]:
    """A message that it knew, with what it knew of it: fields beyond are ignored, missing ones are not."""
    message = msgspec.msgpack.decode(frame)
    return message[: len(SHAPES[message[0]])]


def write_state(home: Path, spec: dict[str, Any], process: psutil.Process, argv: list[str]) -> Path:
    """The state file of a worker that it started, and its counter of epochs."""
    (home / "run" / "workers").mkdir(mode=0o700, exist_ok=True)
    (home / "run" / "epoch").write_text(str(spec["epoch"]))
    path = home / "run" / "workers" / f"{spec['name']}.json"
    known = {"pid": process.pid, "epoch": spec["epoch"], "create_time": process.create_time()}
    path.write_text(json.dumps(known | {"spec": spec, "argv": argv}))
    return path


def read_state(path: Path) -> dict[str, Any]:
    """A state file as it was read: strictly. It knew a process by its creation time and its arguments."""
    state = json.loads(path.read_bytes())
    assert state["spec"].keys() <= SPEC.keys(), "a specification that it did not read"
    process = psutil.Process(state["pid"])
    assert process.status() != psutil.STATUS_ZOMBIE
    assert abs(process.create_time() - state["create_time"]) < 0.05
    assert process.cmdline()[1:] == state["argv"][1:]
    return state


class Gateway:
    """Its end of the sockets, for one worker that is adopted."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._identity = f"{spec['name']}#{spec['epoch']}".encode()
        self._context = zmq.Context()
        self._router: Any = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(spec["down"])
        self._pull: Any = self._context.socket(zmq.PULL)
        self._pull.bind(spec["up"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in (self._router, self._pull):
            socket.close(linger=0)
        self._context.term()

    def welcome(self) -> None:
        """Send until the worker has connected again."""
        deadline = time.monotonic() + patient(20)
        while True:
            try:
                return self.send(WELCOME, 0, 1, 1.0)
            except zmq.ZMQError:
                assert time.monotonic() < deadline, "the worker did not connect"
                time.sleep(0.01)

    def send(self, tag: int, *fields: Any) -> None:
        self._router.send_multipart([self._identity, encode(tag, *fields)])

    def expect(self, tag: int, where: Callable[[list[Any]], bool] = lambda _: True) -> list[Any]:
        """The next message of this kind."""
        deadline = time.monotonic() + patient(20)
        while True:
            assert self._pull.poll(max(0.0, deadline - time.monotonic()) * 1e3), f"no message {tag}"
            message = decode(self._pull.recv())
            if message[0] == tag and where(message):
                return message
