"""The version before, as what it left behind: a state file of commit `e954cef`, and the frames of a hand-over.

Nothing here comes from `protocol`, which is this version's.
"""

import json
import time
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil
import zmq

from tests.support.scale import patient

WELCOME, SHUTDOWN, HELLO, GOODBYE = 1, 13, 32, 42
# Its protocol, and the fields of the messages that worker and gateway exchange at a hand-over.
PROTOCOL = 1
FIELDS: Final = {WELCOME: 3, SHUTDOWN: 1, HELLO: 8, GOODBYE: 3}
# It read no specification with a field beyond these.
SPEC: Final[dict[str, Any]] = {
    "name": "a", "path": "demo", "epoch": 1, "down": "ipc:///home/me/.mlxd/run/d.sock",
    "up": "ipc:///home/me/.mlxd/run/u.sock", "dtype": "auto", "context": 0, "max_running": 16, "max_waiting": 1048576,
    "prefill_chunk": 512, "trust_remote_code": False, "orphan_grace_s": 30.0, "orphan_max_s": 300.0,
    "log_level": "info", "cache_bytes": -1, "kv_bytes": -1, "parser": "",
    "disk_cache_dir": "/home/me/.mlxd/cache/prefix", "disk_cache_bytes": 10737418240, "disk_cache_tokens": 512,
    "memory_bytes": 11831945651, "chat_template": "",
}  # fmt: skip


def encode(tag: int, *fields: Any) -> bytes:
    """A message as long as that version sent it."""
    assert len(fields) == FIELDS[tag], f"message {tag} had {FIELDS[tag]} fields"
    return msgspec.msgpack.encode([tag, *fields])


def decode(frame: bytes) -> list[Any]:
    """A message as that version read it: fields beyond those that it knew are ignored."""
    message = msgspec.msgpack.decode(frame)
    return message[: 1 + FIELDS.get(message[0], 0)]


def write_state(home: Path, spec: dict[str, Any], process: psutil.Process, argv: list[str]) -> Path:
    """The state file of a worker that it started, and its counter of epochs."""
    (home / "run" / "workers").mkdir(mode=0o700, exist_ok=True)
    (home / "run" / "epoch").write_text(str(spec["epoch"]))
    path = home / "run" / "workers" / f"{spec['name']}.json"
    known = {"pid": process.pid, "epoch": spec["epoch"], "create_time": process.create_time()}
    path.write_text(json.dumps(known | {"spec": spec, "argv": argv}))
    return path


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

    def expect(self, tag: int) -> list[Any]:
        """The next message of this kind."""
        deadline = time.monotonic() + patient(20)
        while True:
            assert self._pull.poll(max(0.0, deadline - time.monotonic()) * 1e3), f"no message {tag}"
            message = decode(self._pull.recv())
            if message[0] == tag:
                return message
