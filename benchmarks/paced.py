"""A synthetic worker for measuring the gateway: each step gives every running sequence one token, at a steady pace.

Started by the gateway in place of the real worker. The text of a token is the time at which its step was sent
(CLOCK_MONOTONIC is the same in all processes) and a space, so that a client can tell how long it was on the way.
"""

import argparse
import os
import time
from typing import Any, Final

import msgspec
import zmq

from protocol import PROTOCOL, __version__, codec, sockets
from protocol.from_worker import Accepted, Delta, Drained, Finish, Hello, Pong, Ready, Step, Up, Usage
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import Abort, Drain, Generate, Ping, Shutdown

STATS_S: Final = 0.1
IDLE_POLL_MS: Final = 1000
# The gateway is considered gone after this time without a Ping.
ORPHAN_S: Final = 30.0


class Paced:
    """Synthetic worker: one thread, both sockets, and the running sequences (rid to number of tokens left and done)."""

    def __init__(self, spec: WorkerSpec, step_s: float) -> None:
        self._spec = spec
        self._step_s = step_s
        context = zmq.Context()
        self._down: Any = sockets.connect_dealer(context, spec.down, spec.identity)
        self._up: Any = sockets.connect_push(context, spec.up)
        self._left: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._seq = 0
        self._stats_due = 0.0
        self._heard = 0.0
        self._is_stopping = False

    def run(self) -> None:
        """Run until Shutdown, or until the gateway is gone."""
        self._down.send(b"")
        spec = self._spec
        self._send(Hello(spec.name, spec.epoch, os.getpid(), PROTOCOL, 0, __version__, "", "ready"))
        self._send(Ready(spec.epoch, spec.path, 1 << 20, spec.max_running, 4096, 0, 0.0))
        due = self._heard = time.monotonic()
        while not self._is_stopping:
            now = time.monotonic()
            if now - self._heard > ORPHAN_S:
                break
            if not self._left:
                self._receive(IDLE_POLL_MS)
                due = time.monotonic() + self._step_s
            elif now < due:
                # Polling has a resolution of a millisecond; the rest of the wait is slept.
                wait_ms = int((due - now) * 1000)
                if wait_ms:
                    self._receive(wait_ms)
                else:
                    time.sleep(due - now)
            else:
                self._step()
                due += self._step_s

    def _receive(self, wait_ms: int) -> None:
        while self._down.poll(wait_ms):
            wait_ms = 0
            self._heard = time.monotonic()
            match codec.decode_down(self._down.recv()):
                case Generate() as request:
                    self._left[request.rid] = request.max_tokens or 1 << 30
                    self._done[request.rid] = 0
                    self._send(Accepted(request.rid, 10))
                case Abort() as abort:
                    self._send_step([self._end(rid, "", Finish.ABORT) for rid in abort.rids if rid in self._left])
                case Ping() as ping:
                    self._send(Pong(ping.seq, ping.t_ns, self._stats()))
                case Drain():
                    self._send(Drained(self._spec.epoch, 0))
                case Shutdown():
                    self._is_stopping = True
                case _:
                    pass

    def _step(self) -> None:
        text = f"{time.monotonic_ns()} "
        deltas: list[Delta] = []
        for rid in list(self._left):
            self._left[rid] -= 1
            self._done[rid] += 1
            if self._left[rid]:
                deltas.append(Delta(rid, text=text, token_ids=(1000,)))
            else:
                deltas.append(self._end(rid, text, Finish.LENGTH))
        self._send_step(deltas)

    def _end(self, rid: int, text: str, finish: Finish) -> Delta:
        del self._left[rid]
        done = self._done.pop(rid)
        return Delta(rid, text=text, token_ids=(1000,) if text else (), finish=finish, usage=Usage(10, 0, done))

    def _send_step(self, deltas: list[Delta]) -> None:
        self._seq += 1
        now = time.monotonic()
        is_due = now >= self._stats_due
        if is_due:
            self._stats_due = now + STATS_S
        self._send(Step(self._spec.epoch, self._seq, deltas, self._stats() if is_due else None))

    def _stats(self) -> Stats:
        return Stats(len(self._left), 0, self._seq, 0, 0, 0, 0, 0)

    def _send(self, message: Up) -> None:
        self._up.send(codec.encode(message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--spec", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    args = parser.parse_args()
    Paced(msgspec.json.decode(args.spec, type=WorkerSpec), args.step_ms / 1000).run()


if __name__ == "__main__":
    main()
