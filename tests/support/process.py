"""A real worker process and a gateway small enough to read: one ROUTER, one PULL."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import zmq

from protocol import codec
from protocol.from_worker import Goodbye, Pong, Ready, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Down, Ping, Welcome
from tests.support.scale import patient
from tests.support.wire import Wire

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30
Message = TypeVar("Message")


def start(spec: WorkerSpec | str, home: Path, *, has_log_pipe: bool = False) -> subprocess.Popen[bytes]:
    """As the pool starts it; stderr goes to a file in `home`, or to a pipe as from a real gateway."""
    as_json = spec if isinstance(spec, str) else msgspec.json.encode(spec).decode()
    with (home / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "test", "--spec", as_json],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if has_log_pipe else stderr,
            start_new_session=True,
        )


class Gateway:
    """`with Gateway(home, path) as gateway`: starts a worker for the model at `path`, kills it at the end."""

    def __init__(self, home: Path, path: Path | str, *, has_log_pipe: bool = False, **settings: Any) -> None:
        self._has_log_pipe = has_log_pipe
        self.home = home
        self.wire = Wire(home)
        self.spec = WorkerSpec(
            name="test",
            path=str(path),
            epoch=3,
            down=self.wire.down,
            up=self.wire.up,
            **{"log_level": "info", **settings},
        )
        self.seen: list[Up] = []
        self._read = 0

    def __enter__(self) -> Self:
        self._router, self._pull = self.wire.router(), self.wire.pull()
        self.process = start(self.spec, self.home, has_log_pipe=self._has_log_pipe)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(patient(TIMEOUT_S))
        self.wire.__exit__()

    def ready(self, ping_s: float | None = None) -> Ready:
        """Welcome the worker and wait until its model is loaded, with a ping after each silence of `ping_s`."""
        self.reachable()
        self.send(Welcome(0, 1, 1.0))
        if ping_s is not None:
            deadline = time.monotonic() + patient(TIMEOUT_S)
            while not any(isinstance(message, Ready) for message in self.seen) and time.monotonic() < deadline:
                if not self.poll(ping_s):
                    self.send(Ping(0, 0))
        return self.expect(Ready)

    def reachable(self) -> None:
        """Until the worker's empty frame is here: from now on it can be sent to."""
        assert self._router.poll(patient(TIMEOUT_S) * 1e3), self.stderr()
        assert self._router.recv_multipart() == [self.spec.identity, b""]

    def send(self, message: Down) -> None:
        self.send_frame(codec.encode(message))

    def send_frame(self, frame: bytes) -> None:
        self._router.send_multipart([self.spec.identity, frame])

    def poll(self, timeout_s: float) -> bool:
        """Take in one message, if one comes in time."""
        if not self._pull.poll(timeout_s * 1e3):
            return False
        self.seen.append(codec.decode_up(self._pull.recv()))
        return True

    def restart(self, boot: int) -> None:
        """Die and come back on the same addresses: the worker connects again by itself."""
        for socket in (self._router, self._pull):
            socket.close(linger=0)
        self._router, self._pull = self.wire.router(), self.wire.pull()
        deadline = time.monotonic() + patient(TIMEOUT_S)
        while True:
            try:
                return self.send(Welcome(0, boot, 1.0))
            except zmq.ZMQError:  # EHOSTUNREACH until it has connected
                assert time.monotonic() < deadline, "the worker did not come back"
                time.sleep(0.01)

    def expect(self, kind: type[Message], where: Callable[[Message], bool] = lambda _: True) -> Message:
        """The next message of this kind that was not expected before; fails at once after the worker's last one."""
        deadline = time.monotonic() + patient(TIMEOUT_S)
        while True:
            while self._read < len(self.seen):
                message = self.seen[self._read]
                self._read += 1
                if isinstance(message, kind) and where(message):
                    return message
                assert not isinstance(message, Goodbye), f"{message} {self.stderr()}"
            assert self.poll(deadline - time.monotonic()), f"no {kind.__name__}; {self.seen[-5:]} {self.stderr()}"

    def pong(self, seq: int) -> Pong:
        self.send(Ping(seq, time.monotonic_ns()))
        return self.expect(Pong, lambda pong: pong.seq == seq)

    def exit_status(self) -> int:
        return self.process.wait(patient(TIMEOUT_S))

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def stderr(self) -> str:
        return (self.home / "stderr").read_text(errors="replace")

    def wait_for_stderr(self, text: str) -> str:
        deadline = time.monotonic() + patient(TIMEOUT_S)
        while text not in self.stderr():
            assert time.monotonic() < deadline, self.stderr()
            time.sleep(0.01)
        return self.stderr()
