"""A worker without a model: speaks the real protocol, paces tokens, and misbehaves when told to.

Options say how it starts; a text prompt that names a fault (`kill`, `deaf`, …) makes it happen to a running worker.
The last token of a prompt `hold PATH` comes once there is a file at PATH, so that a test decides when its stream ends.
Token i of a sequence is the id i and the text "ti ", so that a test sees at once what was lost or moved.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from protocol import PROTOCOL, __version__, codec, sockets
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    AdapterInfo,
    AdaptersSet,
    Delta,
    Drained,
    Explained,
    Finish,
    Goodbye,
    Hello,
    Loading,
    MissCause,
    MissCode,
    Pong,
    Ready,
    Rejected,
    Step,
    Tokenized,
    Up,
    Usage,
)
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import (
    Abort,
    ChatPrompt,
    Detokenize,
    Down,
    Drain,
    Dump,
    Explain,
    Generate,
    Ping,
    Prompt,
    SetAdapters,
    SetLogLevel,
    SetMemory,
    SetPace,
    Shutdown,
    TextPrompt,
    Tokenize,
    Welcome,
)

IDLE_POLL_MS = 1000
# Half a second each.
ORPHAN_SENDS = 60
# As its load tells them.
WEIGHTS_BYTES = 100 << 20
PROMPT_TOKENS = 3


@dataclass(slots=True)
class Row:
    """One running sequence."""

    left: int
    done: int = 0
    # The file that its last token waits for.
    hold: Path | None = None

    def next_ids(self, count: int) -> range:
        """At most `count` tokens that may come now."""
        free = self.left - 1 if self.hold is not None and not self.hold.exists() else self.left
        return range(self.done, self.done + min(count, free))


class Scripted:
    """One thread, both sockets, the rows that run."""

    def __init__(self, spec: WorkerSpec, options: argparse.Namespace) -> None:
        self.spec = spec
        self.options = options
        self.epoch = spec.epoch + options.epoch_offset
        context = zmq.Context()
        self.down: Any = sockets.connect_dealer(context, spec.down, spec.identity)
        self.up: Any = sockets.connect_push(context, spec.up)
        self.rows: dict[int, Row] = {}
        self.seq = 0
        self.boot = 0
        self.is_ready = False
        self.stuck_since = 0.0
        self.adapters = SetAdapters(0, spec.adapters)
        self.orders = [SetMemory(spec.memory_bytes)]
        # What it holds for nothing.
        self.ballast = b""
        self.status: int | None = None
        self.drain_at = float("inf")
        self.tenths_loaded = 0

    def run(self) -> int:
        self.down.send(b"")
        self.send(self.hello())
        if self.options.exit_on_load is not None:
            return self.fail_load()
        ready_at = time.monotonic() + self.options.load_s
        due = 0.0
        while self.status is None:
            now = time.monotonic()
            if not self.is_ready and now >= ready_at and not self.options.hang_on_load:
                self.is_ready = True
                self.send(self.ready())
            elif not self.is_ready and not self.options.hang_on_load:
                self.tell_load(1 - (ready_at - now) / self.options.load_s)
            if not self.rows or self.stuck_since:
                self.receive(IDLE_POLL_MS if self.is_ready else 10)
                due = time.monotonic() + self.options.step_ms / 1000
            elif now < due:
                self.receive(max(1, int((due - now) * 1000)))
            else:
                self.step()
                due += self.options.step_ms / 1000
            if (not self.rows and self.drain_at < float("inf")) or now > self.drain_at:
                self.finish_drain()
        return self.status

    # -- what it is told ---------------------------------------------------------------------------------------------

    def receive(self, wait_ms: int) -> None:
        while self.down.poll(wait_ms):
            wait_ms = 0
            self.handle(codec.decode_down(self.down.recv()))

    def handle(self, message: Down) -> None:
        match message:
            case Welcome(boot=boot):
                if boot != self.boot and self.boot:
                    self.send(self.hello())
                    if self.is_ready:
                        self.send(self.ready())
                self.boot = boot
            case Generate():
                self.generate(message)
            case Abort(rids=rids):
                self.send_step([self.end(rid, Finish.ABORT) for rid in rids if rid in self.rows])
            case Tokenize(prompt=TextPrompt("never")):
                pass
            case Tokenize(rid):
                self.send(Tokenized(rid, PROMPT_TOKENS, tuple(range(PROMPT_TOKENS))))
            case Explain(rid, of, shows_text=shows_text):
                old = "an excerpt" if shows_text else "#0f"
                cause = MissCause(MissCode.MESSAGE, 2, 3, 1, "user", old, old)
                self.send(Explained(rid, PROMPT_TOKENS, 0, 0, 3, of, causes=(cause,)))
            case Detokenize(rid, ids):
                self.send(Tokenized(rid, len(ids), text="".join(f"t{i} " for i in ids)))
            case Ping(seq, t_ns):
                self.send(Pong(seq, t_ns, self.stats()))
            case SetAdapters():
                self.adapters = message
                if not self.options.adapters_at_drain:
                    self.tell_adapters()
            case Drain(deadline_s):
                self.drain_at = time.monotonic() + deadline_s
                if self.options.adapters_at_drain:
                    self.tell_adapters()
            case Shutdown():
                if not self.options.ignore_sigterm:
                    self.send_step([self.end(rid, Finish.ABORT) for rid in list(self.rows)])
                    self.send(Goodbye(self.epoch, "asked"))
                    self.status = 0
            case Dump():
                tell("dumped")
            case SetLogLevel(level):
                tell(f"logs from {level} on")
            case SetMemory():
                self.orders.append(message)
                tell(f"told {message}")
            case SetPace():
                tell(f"told {message}")

    def generate(self, request: Generate) -> None:
        text = request.prompt.text if isinstance(request.prompt, TextPrompt) else ""
        if text in ("ignored", self.options.ignore_prompt):
            return
        if text == "refused":
            self.send(Rejected(request.rid, Failure(Code.INVALID_REQUEST, "refused")))
            return
        if text == "too long":
            self.send(Rejected(request.rid, Failure(Code.CONTEXT_LENGTH_EXCEEDED, "too long")))
            return
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        if request.questions:
            data = bytes(4 * sum(len(question.labels) for question in request.questions))
            usage = Usage(PROMPT_TOKENS, 0, 0)
            self.send_step([Delta(request.rid, data=data), Delta(request.rid, finish=Finish.STOP, usage=usage)])
            return
        done = len(request.resume)
        left = min(1 << 30 if request.max_tokens is None else request.max_tokens, self.options.most_tokens) - done
        self.rows[request.rid] = Row(left, done, hold_of(request.prompt))
        self.misbehave(text)

    def misbehave(self, fault: str) -> None:
        match fault.split():
            case ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["deaf"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["stuck"]:
                self.stuck_since = time.monotonic()
            case ["exit", status]:
                failure = Failure(Code.WORKER_DIED, "the step loop failed")
                self.send_step([Delta(rid, finish=Finish.ERROR, failure=failure) for rid in self.rows])
                self.send(Goodbye(self.epoch, "fault", failure))
                self.status = int(status)
            case ["grow", mebibytes]:
                self.ballast = os.urandom(int(mebibytes) << 20)
            case ["garbage"]:
                for frame in (b"", b"\xc1", b"\x93\x25", os.urandom(64), b"\x92\xcc\xff\x01", b"\xdd\xff\xff\xff\xff"):
                    self.up.send(frame)
            case ["stale"]:
                ghosts = [Delta(rid, text="ghost") for rid in self.rows]
                self.send(Step(self.epoch - 1, 1, ghosts))
                self.send(Ready(self.epoch - 1, "ghost", 1, 1, 1, 1, 0.0))
            case ["twin"]:
                twin = Hello(self.spec.name, self.epoch, os.getpid() + 1, PROTOCOL, 0, __version__, "", "ready")
                self.send(twin)
                self.send(msgspec.structs.replace(twin, epoch=self.epoch + 1000))
            case _:
                pass

    # -- what it says ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        deltas: list[Delta] = []
        for rid in list(self.rows):
            row = self.rows[rid]
            ids = row.next_ids(self.options.tokens_per_step)
            if not ids and row.left:
                continue
            row.done += len(ids)
            row.left -= len(ids)
            text = "".join(f"t{i} " for i in ids)
            finish = None if row.left else Finish.LENGTH
            usage = Usage(PROMPT_TOKENS, 0, row.done) if finish is not None else None
            deltas.append(Delta(rid, text=text, token_ids=tuple(ids), finish=finish, usage=usage))
            if finish is not None:
                del self.rows[rid]
        self.send_step(deltas)

    def end(self, rid: int, finish: Finish) -> Delta:
        return Delta(rid, finish=finish, usage=Usage(PROMPT_TOKENS, 0, self.rows.pop(rid).done))

    def send_step(self, deltas: list[Delta]) -> None:
        self.seq += 1
        stats = self.stats() if self.seq % 4 == 1 else None
        self.send(Step(self.epoch, self.seq, deltas, stats))

    def finish_drain(self) -> None:
        self.drain_at = float("inf")
        aborted = len(self.rows)
        self.send_step([self.end(rid, Finish.ABORT) for rid in list(self.rows)])
        self.send(Drained(self.epoch, aborted))

    def tell_adapters(self) -> None:
        infos = tuple(AdapterInfo(name, path, 1) for name, path in self.adapters.adapters)
        self.send(AdaptersSet(self.epoch, self.adapters.call_id, infos))

    def tell_load(self, part: float) -> None:
        """Each tenth of it."""
        if (tenths := int(part * 10)) > self.tenths_loaded:
            self.tenths_loaded = tenths
            self.send(Loading(self.epoch, "weights", tenths * WEIGHTS_BYTES // 10, WEIGHTS_BYTES))

    def fail_load(self) -> int:
        self.send(Loading(self.epoch, "weights"))
        tell("about to fail")
        code = self.options.goodbye_code
        if code is not None:
            self.send(Goodbye(self.epoch, "load", Failure(Code(code), "cannot be loaded")))
        return self.options.exit_on_load

    def hello(self) -> Hello:
        state = "ready" if self.is_ready else "loading"
        return Hello(self.spec.name, self.epoch, os.getpid(), self.options.protocol, 0, __version__, "", state)

    def ready(self) -> Ready:
        return Ready(self.epoch, self.spec.path, 1 << 20, self.spec.max_running or 16, 4096, 0, self.options.load_s)

    def stats(self) -> Stats:
        age_ms = int((time.monotonic() - self.stuck_since) * 1000) if self.stuck_since else 0
        granted = self.orders[-1].memory_bytes
        return Stats(len(self.rows), 0, self.seq, age_ms, 0, 0, 0, 0, granted_bytes=granted)

    def send(self, message: Up) -> None:
        # Without a gateway a send times out: another one may come.
        for _ in range(ORPHAN_SENDS):
            with contextlib.suppress(zmq.Again):
                self.up.send(codec.encode(message))
                return
        sys.exit(1)


def tell(text: str) -> None:
    """Print it at once. Nobody reads what an adopted worker prints."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def hold_of(prompt: Prompt) -> Path | None:
    """The file of `hold PATH`, which is a prompt of text or the last message of a chat."""
    match prompt:
        case TextPrompt(text=text) | ChatPrompt(messages=[*_, {"content": str(text)}]) if text.startswith("hold "):
            return Path(text.removeprefix("hold "))
        case _:
            return None


def main(kind: type[Scripted] = Scripted) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--most-tokens", type=int, default=1 << 30, help="of one sequence, as if a context were full")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--hang-on-load", action="store_true")
    parser.add_argument("--exit-on-load", type=int)
    parser.add_argument("--goodbye-code", type=int)
    parser.add_argument("--ignore-prompt", help="as if it waited for others for ever")
    parser.add_argument("--adapters-at-drain", action="store_true", help="loaded only when it is told to drain")
    parser.add_argument("--ignore-sigterm", action="store_true", help="and Shutdown")
    parser.add_argument("--epoch-offset", type=int, default=0, help="claim another epoch")
    parser.add_argument("--protocol", type=int, default=PROTOCOL, help="claim another number")
    options = parser.parse_args()
    spec = msgspec.json.decode(options.spec, type=WorkerSpec)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = kind(spec, options)
    if not options.ignore_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: worker.handle(Shutdown()))
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
