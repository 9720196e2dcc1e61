"""A real group without a gateway: rank 0 is an engine of this process, or a process as its followers are."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from gateway.workers.supervisor.ranks import ranks_of
from protocol.from_worker import Delta, Ready, Rejected, Step
from protocol.spec import GroupSpec, WorkerSpec
from protocol.to_worker import Generate, Shutdown
from tests.support.engine import Result
from tests.support.process import Gateway
from tests.support.scale import patient

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


def ranks_with(spec: WorkerSpec, **changes: Any) -> list[WorkerSpec]:
    """The specifications of all ranks at one start; `changes` are of their deadlines."""
    patience = {
        "join_s": patient(DEADLINE_S),
        "load_s": patient(DEADLINE_S),
        "beat_s": patient(6),
        "step_s": patient(10),
    } | changes
    return [replace(each, rank=replace(each.rank, **patience)) for each in ranks_of(spec) if each.rank is not None]


def group_spec(path: Path, parallel: str, size: int = 2, **settings: Any) -> WorkerSpec:
    group = GroupSpec(("local",) * size, parallel, "ring")
    return WorkerSpec(name="test", path=str(path), epoch=1, down="", up="", group=group, **settings)


def start(spec: WorkerSpec, home: Path, program: Sequence[str] = ("-m", "worker")) -> "subprocess.Popen[bytes]":
    """A rank as the gateway starts it; what it prints goes to a file in `home`."""
    assert spec.rank is not None
    with (home / f"rank{spec.rank.rank}").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", *program, "test", "--spec", "-"],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec))
    process.stdin.close()
    return process


class RunningGroup(Gateway):
    """`with RunningGroup(home, spec) as group`: all ranks as processes, killed at the end.

    `programs` replace the worker's for some ranks, `changes` are of deadlines.
    """

    def __init__(
        self, home: Path, spec: WorkerSpec, programs: dict[int, Sequence[str]] | None = None, **changes: Any
    ) -> None:
        super().__init__(home, spec.path)
        wired = replace(spec, name="test", epoch=self.spec.epoch, down=self.wire.down, up=self.wire.up)
        self.specs = ranks_with(wired, **changes)
        self.spec = self.specs[0]
        self._programs = programs or {}
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.results: dict[int, Result] = {}

    def __enter__(self) -> Self:
        self._router, self._pull = self.wire.router(), self.wire.pull()
        for rank, spec in enumerate(self.specs):
            self.start_rank(rank, spec)
        self.process = self.ranks[0]
        return self

    def start_rank(self, rank: int, spec: WorkerSpec) -> None:
        self.ranks.append(start(spec, self.home, self._programs.get(rank, ("-m", "worker"))))

    def __exit__(self, *details: object) -> None:
        for process in self.ranks[1:]:
            if process.poll() is None:
                process.kill()
            process.wait(patient(DEADLINE_S))
        super().__exit__(*details)

    def stderr(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')}" for file in sorted(self.home.glob("rank*")))

    def submit(self, request: Generate) -> Result:
        self.send(request)
        return self.results.setdefault(request.rid, Result())

    def run(self, requests: Iterable[Generate]) -> list[Result]:
        """All at once, to their ends."""
        results = [self.submit(request) for request in requests]
        while not all(result.terminals for result in results):
            self.step()
        return results

    def step(self) -> None:
        """Take in the next message that has output."""
        message = self.expect((Step, Rejected))  # type: ignore[arg-type]
        if isinstance(message, Rejected):
            self.results[message.rid].failure = message.failure
            self.results[message.rid].terminals += 1
            return
        assert isinstance(message, Step)
        for delta in message.deltas:
            self._take(self.results[delta.rid], delta)

    def _take(self, result: Result, delta: Delta) -> None:
        assert result.terminals == 0, "a delta after the terminal one"
        result.deltas.append(delta)
        result.text += delta.text
        result.ids += delta.token_ids
        result.logprobs += delta.logprobs or ()
        if delta.finish is not None:
            result.finish, result.usage, result.failure = delta.finish, delta.usage, delta.failure
            result.terminals += 1

    def stop(self) -> list[int]:
        """Exit statuses of all ranks after an order to shut down."""
        self.send(Shutdown())
        return self.statuses()

    def statuses(self) -> list[int]:
        return [process.wait(patient(DEADLINE_S)) for process in self.ranks]

    def ready_group(self) -> Ready:
        ready = self.ready()
        assert ready.group is not None
        return ready
