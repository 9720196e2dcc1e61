"""Simulated worker: it speaks the real protocol, and its model's answer is a function of the prompt."""

import signal
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from protocol import PROTOCOL, __version__, codec
from protocol.failures import Code, ExitStatus, Failure
from protocol.from_worker import (
    Accepted,
    AdaptersSet,
    Delta,
    Drained,
    Finish,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Ready,
    Rejected,
    Step,
    Tokenized,
    Up,
    Usage,
)
from protocol.stats import Stats
from protocol.to_worker import (
    Abort,
    ChatPrompt,
    Detokenize,
    Down,
    Drain,
    Generate,
    NextTurnPrompt,
    Ping,
    SetAdapters,
    SetMemory,
    Shutdown,
    Tokenize,
    Welcome,
)

if TYPE_CHECKING:
    from tests.simulation.world import Process

PROMPT_TOKENS = 7
LENGTH_MAX = 60
STEP_S = 0.03
# Time beyond the latency in which an abort reaches its worker.
ABORT_S = 0.05
# Last word of the prompts that ask for several choices.
CHOICES = "choices"
ORPHAN_CHECK_S = 10.0
ORPHAN_CHECKS = 3
_WEIGHTS = 1 << 30


@cache
def answer_ids(model: str, prompt: str) -> list[int]:
    """The model's whole answer to a prompt, as token ids. Seeds have few prompts, and each is asked for many times."""
    digest = blake2b(f"{model}\0{prompt}".encode(), digest_size=64).digest()
    length = 1 + digest[0] % LENGTH_MAX
    return [digest[1 + i % 63] * 256 + i for i in range(length)]


def asked_text(prompt: str, seed: int) -> str:
    """Return what an answer depends on: a prompt that asks for choices has another answer for each seed."""
    return f"{prompt} {seed}" if prompt.endswith(CHOICES) else prompt


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    return "".join(f"w{i} " for i in ids)


class Corrupt(AssertionError):
    """The gateway has sent a message that does not agree with what this worker's model has said."""


@dataclass(slots=True)
class Row:
    """One running sequence."""

    ids: list[int]
    limit: int
    done: int
    # What the key and the gateway are charged for; None for the prefill of a next turn.
    work: "Work | None"
    # Since when the gateway does not know the sequence; None while it does.
    unknown_since: float | None = None


@dataclass(slots=True)
class Work:
    """What workers have done for one sequence. The world has it, because a sequence may go on at another worker."""

    key: str
    model: str
    tokens: int = 0


class SimulatedWorker:
    """State of one worker process. The process calls it only while it runs."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.world = process.world
        self.spec = process.spec
        self.epoch = process.spec.epoch
        self.memory_bytes = process.spec.memory_bytes
        # Memory that it holds, and what it takes beyond its share.
        self.own_bytes = _WEIGHTS // 2
        self.rows: dict[int, Row] = {}
        # Sequences that it has ended with an answer.
        self.answered: set[int] = set()
        self.boot = 0
        self.is_ready = self.is_stuck = self.is_lying = False
        self.is_stepping = self.is_ending = False
        self.generated = 0
        # Number of rows after the newest step, which is what a worker reports while a step runs or hangs.
        self.running = 0
        self.seq = 0
        self.drain_at: float | None = None
        self.stuck_since = 0.0
        self.overrun = 0
        self.silent_checks = 0

    @property
    def footprint(self) -> int:
        return self.own_bytes + self.overrun

    def _resize(self) -> None:
        if self.is_ready:
            before, self.own_bytes = self.own_bytes, min(self.memory_bytes or 4 * _WEIGHTS, _WEIGHTS * 3)
            self.world.own_bytes += self.own_bytes - before

    # -- load ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        rates, world = self.world.rates, self.world
        self.process.later(ORPHAN_CHECK_S, self.check_orphan)
        self.send(self.hello())
        self.send(Loading(self.epoch, "weights", 0, _WEIGHTS))
        if world.chance("load fails", rates.load_fails):
            code = world.random.choice([None, None, Code.MODEL_CORRUPT, Code.OUT_OF_MEMORY])
            if code is not None:
                self.send(Goodbye(self.epoch, "load", Failure(code, "cannot be loaded")))
            status = {None: -int(signal.SIGSEGV), Code.MODEL_CORRUPT: int(ExitStatus.MODEL_UNUSABLE)}
            self.process.later(0.01, lambda: self.process.exit(status.get(code, int(ExitStatus.OUT_OF_MEMORY))))
        elif world.chance("load hangs", rates.load_hangs):
            # Half of them claim to be ready, but in another epoch.
            if world.random.random() < 0.5:
                self.send(Ready(self.past_epoch(), self.spec.path, 1 << 20, 16, 4096, _WEIGHTS, 1.0))
        else:
            self.process.later(world.random.random() * 3 + 0.05, self._load)

    def _load(self) -> None:
        self.is_ready = True
        self._resize()
        self.is_lying = self.world.chance("lies", self.world.rates.lies)
        if self.is_lying:
            self.overrun = _WEIGHTS * 2
        self.send(self.ready())

    def check_orphan(self) -> None:
        """End without a gateway. Checks are counted, so that a jump of the clock is one check."""
        self.silent_checks += 1
        if self.silent_checks > ORPHAN_CHECKS:
            self.process.exit(0)
        else:
            self.process.later(ORPHAN_CHECK_S, self.check_orphan)

    # -- messages of the gateway ---------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        message = codec.decode_down(frame)
        self.silent_checks = 0
        self.world.note(f"{self.spec.name}#{self.epoch} < {type(message).__name__}")
        self.handle(message)

    def handle(self, message: Down) -> None:
        match message:
            case Welcome(boot=boot):
                if self.world.chance("loses welcome", self.world.rates.loses_welcome):
                    self.process.impaired_at = self.world.loop.time()
                elif boot != self.boot:
                    self.boot = boot
                    self.send(self.hello())
                    if self.is_ready:
                        self.send(self.ready())
            case Generate():
                self.generate(message)
            case Abort(rids):
                # An engine that hangs ends no sequence.
                if not self.is_stuck:
                    self.end_rows([rid for rid in rids if rid in self.rows])
            case Tokenize(rid):
                self.send(Tokenized(rid, PROMPT_TOKENS, tuple(range(PROMPT_TOKENS))))
            case Detokenize(rid, ids):
                self.send(Tokenized(rid, len(ids), text=text_of(ids)))
            case Ping(seq, t_ns):
                if not (self.is_stuck and self.stuck_since < 0):
                    self.send(Pong(seq, t_ns, self.stats()))
            case SetAdapters():
                self.send(AdaptersSet(self.epoch, message.call_id, ()))
            case Drain(deadline_s):
                self.drain_at = self.world.loop.time() + deadline_s
                self.process.later(deadline_s, self.check_drain)
                self.check_drain()
            case SetMemory(memory_bytes=memory_bytes):
                self.memory_bytes = memory_bytes
                self._resize()
            case Shutdown():
                self.shut_down()
            case _:
                pass

    def generate(self, request: Generate) -> None:
        if self.is_stuck:
            return
        if not self.is_ready:
            raise Corrupt(f"sequence {request.rid} was sent to {self.spec.name}#{self.epoch}, which is not loaded")
        prompt = request.prompt
        if isinstance(prompt, NextTurnPrompt):
            self.prefill(request.rid, prompt)
            return
        assert isinstance(prompt, ChatPrompt)
        text = str(prompt.messages[-1]["content"])
        ids = answer_ids(self.spec.name, asked_text(text, request.sampling.seed))
        resume = list(request.resume)
        if resume != ids[: len(resume)]:
            raise Corrupt(f"sequence {text!r} is resumed with {resume}, but its answer is {ids}")
        if request.rid in self.rows:
            raise Corrupt(f"sequence {text!r} was sent twice to {self.spec.name}#{self.epoch}")
        if "refused" in text:
            self.send(Rejected(request.rid, Failure(Code.INVALID_REQUEST, "refused")))
            return
        limit = min(len(ids), request.max_tokens or len(ids))
        work = self.world.work.setdefault(request.rid, Work(text.split()[0], self.spec.name))
        self.begin_row(request.rid, Row(ids, limit, len(resume), work))

    def prefill(self, rid: int, turn: NextTurnPrompt) -> None:
        """Begin the prefill of a next turn, which generates nothing."""
        if turn.rid not in self.answered:
            raise Corrupt(f"{self.spec.name}#{self.epoch} gets the next turn of {turn.rid}, which it has not answered")
        self.begin_row(rid, Row([], 0, 0, None))

    def begin_row(self, rid: int, row: Row) -> None:
        self.send(Accepted(rid, PROMPT_TOKENS))
        self.rows[rid] = row
        if not self.is_stepping:
            self.is_stepping = True
            self.process.later(STEP_S * (1 + self.world.random.random()), self.step)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.is_stepping = False
        if self.is_stuck or not self.rows or self.misbehave():
            return
        deltas: list[Delta] = []
        for rid, row in list(self.rows.items()):
            count = self.world.random.choice((1, 1, 2, 4, 8))
            ids = row.ids[row.done : min(row.done + count, row.limit)]
            row.done += len(ids)
            if row.work is not None:
                row.work.tokens = max(row.work.tokens, row.done)
                self.check_wanted(rid, row)
            self.generated += len(ids)
            finish = None if row.done < row.limit else Finish.STOP if row.limit == len(row.ids) else Finish.LENGTH
            usage = Usage(PROMPT_TOKENS, 0, row.done) if finish is not None else None
            deltas.append(Delta(rid, text=text_of(ids), token_ids=tuple(ids), finish=finish, usage=usage))
            if finish is not None:
                del self.rows[rid]
                self.answered.add(rid)
        self.running = len(self.rows)
        self.send_step(deltas)
        if self.world.chance("twice", self.world.rates.twice):
            # Only ended sequences: a repeated delta of a running one would be a different answer.
            self.send_step([delta for delta in deltas if delta.finish is not None])
        self.check_drain()
        if self.rows:
            self.is_stepping = True
            self.process.later(STEP_S * (0.5 + self.world.random.random()), self.step)

    def check_wanted(self, rid: int, row: Row) -> None:
        """Check that a sequence whose gateway does not know it any more is not generated for longer than an abort
        takes.
        """
        now = self.world.loop.time()
        if self.world.is_wanted(rid):
            row.unknown_since = None
        elif row.unknown_since is None:
            row.unknown_since = now
        elif now - row.unknown_since > self.world.rates.latency_s + ABORT_S and self.process.is_sound:
            raise Corrupt(f"{self.spec.name}#{self.epoch} was not told to abort {rid}, which nobody reads")

    def misbehave(self) -> bool:
        """Draw a fault of this step. Return whether the worker does not go on."""
        world, rates = self.world, self.world.rates
        if world.chance("dies", rates.dies):
            self.process.exit(world.random.choice((-9, -11, -6, 1, 70)))
            return True
        # The first step of an idle loop is rare, and hangs more often here.
        if world.chance("hangs", rates.hangs if self.running else 5 * rates.hangs):
            self.is_stuck = True
            # Half of them answer pings, with the age of the newest step; the others are silent.
            self.stuck_since = world.loop.time() if world.random.random() < 0.5 else -1.0
            return True
        if world.chance("stops", rates.stops):
            self.process.signal(signal.SIGSTOP)
            delay_s = world.random.choice((0.2, 3.0, 40.0))
            world.loop.call_later(delay_s, self.process.signal, signal.SIGCONT)
        if world.chance("nonsense", rates.nonsense):
            junk = [Delta(rid, text="ghost ") for rid in self.rows]
            epoch = self.past_epoch()
            self.send(Step(epoch, 1, junk))
            self.send(Step(self.epoch, 1, [Delta(rid ^ (1 << 40), text="ghost ") for rid in self.rows]))
            self.send(Ready(epoch, "ghost", 1, 1, 1, 1, 0.0))
            self.process.send(world.random.choice((b"", b"\xc1", b"\x93\x25", b"\x92\xcc\xff\x01")))
        return False

    def past_epoch(self) -> int:
        """Return the newest epoch before this one that no running worker has."""
        epochs = {process.spec.epoch for process in self.world.alive()}
        return next(epoch for epoch in range(self.epoch, -1, -1) if epoch not in epochs)

    def end_rows(self, rids: list[int]) -> None:
        ends = [Delta(rid, finish=Finish.ABORT, usage=Usage(PROMPT_TOKENS, 0, self.rows[rid].done)) for rid in rids]
        for rid in rids:
            del self.rows[rid]
        self.running = min(self.running, len(self.rows))
        if ends:
            self.send_step(ends)

    def check_drain(self) -> None:
        if self.drain_at is None or self.is_stuck:
            return
        if not self.rows or self.world.loop.time() >= self.drain_at:
            self.drain_at = None
            aborted = len(self.rows)
            self.end_rows(list(self.rows))
            self.send(Drained(self.epoch, aborted))

    # -- end -----------------------------------------------------------------------------------------------------------

    def on_sigterm(self) -> None:
        self.shut_down()

    def shut_down(self) -> None:
        if self.is_stuck or self.world.chance("ignores shutdown", self.world.rates.ignores_shutdown):
            return
        self.is_ending = True
        self.end_rows(list(self.rows))
        self.send(Goodbye(self.epoch, "asked"))
        self.process.later(self.world.random.random() * 0.2, lambda: self.process.exit(0))

    # -- messages ------------------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        state = "ready" if self.is_ready else "loading"
        return Hello(self.spec.name, self.epoch, self.process.pid, PROTOCOL, 0, __version__, "", state)

    def ready(self) -> Ready:
        return Ready(self.epoch, self.spec.path, 1 << 20, self.spec.max_running or 16, 4096, _WEIGHTS, 1.0)

    def stats(self) -> Stats:
        age_s = self.world.loop.time() - self.stuck_since if self.is_stuck else 0.0
        return Stats(
            self.running,
            0,
            self.seq,
            int(age_s * 1000),
            0,
            0,
            0,
            0,
            generation_tokens=self.generated,
            granted_bytes=self.memory_bytes,
        )

    def send_step(self, deltas: list[Delta]) -> None:
        self.seq += 1
        self.send(Step(self.epoch, self.seq, deltas, self.stats() if self.seq % 4 == 1 else None))

    def send(self, message: Up) -> None:
        self.process.send(codec.encode(message))
