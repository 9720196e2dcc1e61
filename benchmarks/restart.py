"""The first long prompt after a restart, with and without the times that the worker before has kept.

    python -m benchmarks.restart                                    # CPU, the 5m model
    python -m benchmarks.restart --geometry qwen3-8b --dtype bfloat16 --long-tokens 8192 --drafts    # a GPU

Engines of one process, each with a model that is loaded once. An engine serves some streams and long prompts, ends, and
leaves its times in a folder. Then, by turns, a new engine begins without any and with those: four streams run, and a
long prompt comes. What counts is the chunks that it was given, the time to its first token, the longest gap of the
streams, and their tokens a second until the prompt is done.
"""

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from benchmarks import blas, models
from benchmarks.compare import machine
from gateway.ctl.bench.closed_loop import table
from protocol.from_worker import Progress, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling, Shutdown, TokensPrompt
from worker.engine.gauges import Gauges
from worker.engine.inbox import EngineInbox
from worker.engine.loop import Engine
from worker.model.loader import LoadedModel
from worker.prompt.intake import Intake
from worker.start.checked_model import load_checked

STREAMS: Final = 4
WITHOUT: Final = "without"
WITH: Final = "with"
_GREEDY: Final = Sampling(temperature=1.0, ignore_eos=True, seed=1)
_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Seen:
    """Result of one prompt beside the streams: times at which its tokens were processed, and times of the streams'
    tokens.
    """

    long_at: float = 0.0
    first_at: float = 0.0
    # Seconds of CPU from one to the other, which others on the machine do not change.
    cpu_s: float = 0.0
    progress: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    gaps: list[float] = field(default_factory=list[float])
    tokens: int = 0


class Server:
    """Engine on a thread of its own."""

    def __init__(self, loaded: LoadedModel, spec: WorkerSpec, keeps: str) -> None:
        self._inbox = EngineInbox()
        self._changed = threading.Condition()
        self._intake = Intake(loaded)
        self._rids = itertools.count(1)
        self._newest: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._long = 0
        self.seen = Seen()
        self._is_warm = threading.Event()
        args = (loaded, spec, keeps)
        self._thread = threading.Thread(target=self._run, args=args, daemon=True)
        self._thread.start()
        self._is_warm.wait(_TIMEOUT_S)

    def _run(self, loaded: LoadedModel, spec: WorkerSpec, keeps: str) -> None:
        engine = Engine(loaded, spec, self._inbox, self._take, Gauges(), self._intake.writer, keeps=keeps)
        engine.warm_up([1] * 24)
        self._is_warm.set()
        engine.run()

    def close(self) -> None:
        self._inbox.put(Shutdown())
        self._thread.join(_TIMEOUT_S)

    def submit(self, prompt: list[int], most: int, *, is_long: bool = False) -> int:
        rid = next(self._rids)
        self._counts[rid] = 0
        request = Generate(rid, TokensPrompt(tuple(prompt)), _GREEDY, max_tokens=most, want_progress=is_long)
        if is_long:
            self._long, self.seen = rid, Seen(time.perf_counter(), cpu_s=-time.process_time())
        self._inbox.put(self._intake.row(request, time.monotonic()))
        return rid

    def wait(self, rid: int, tokens: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._counts[rid] >= tokens, _TIMEOUT_S)

    def _take(self, message: Up) -> None:
        now = time.perf_counter()
        with self._changed:
            match message:
                case Progress(rid, processed) if rid == self._long:
                    self.seen.progress.append((now, processed))
                case Step(deltas=deltas):
                    for delta in deltas:
                        self._note(delta.rid, len(delta.token_ids), now)
                case _:
                    pass
            self._changed.notify_all()

    def _note(self, rid: int, tokens: int, now: float) -> None:
        if not tokens:
            return
        self._counts[rid] += tokens
        if rid == self._long and not self.seen.first_at:
            self.seen.first_at = now
            self.seen.cpu_s += time.process_time()
        elif self.seen.long_at and not self.seen.first_at:
            self.seen.gaps.append(now - max(self._newest.get(rid, self.seen.long_at), self.seen.long_at))
            self.seen.tokens += tokens
        self._newest[rid] = now


def disturb(server: Server, vocab: int, long_tokens: int, seed: int) -> Seen:
    """Start streams, then send a long prompt beside them."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(tokens)]

    streams = [server.submit(prompt(48), 4096) for _ in range(STREAMS)]
    for rid in streams:
        server.wait(rid, 8)
    server.wait(server.submit(prompt(long_tokens), 2, is_long=True), 1)
    return server.seen


def chunks(seen: Seen) -> list[int]:
    """Return the number of tokens of each chunk, in order."""
    marks = [0, *(done for _, done in seen.progress)]
    return [after - before for before, after in itertools.pairwise(marks) if after > before]


def measure(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, list[Seen]]:
    spec = WorkerSpec(
        name="bench",
        path=str(loaded.path),
        epoch=1,
        down="",
        up="",
        cache_bytes=0,
        speculate="auto" if args.drafts else "off",
    )
    results: dict[str, list[Seen]] = {WITHOUT: [], WITH: []}
    with tempfile.TemporaryDirectory() as folder:
        teacher = Server(loaded, spec, folder)
        for seed in range(2):
            disturb(teacher, loaded.vocab_size, args.long_tokens, seed)
        teacher.close()
        for turn in range(args.turns):
            for way in (WITHOUT, WITH) if turn % 2 == 0 else (WITH, WITHOUT):
                server = Server(loaded, spec, folder if way == WITH else "")
                results[way].append(disturb(server, loaded.vocab_size, args.long_tokens, 100 + turn))
                server.close()
    return results


def main() -> None:
    args = _arguments()
    folder = models.build(args.geometry, args.dtype)
    print(f"{machine()['cpu']} · BLAS: {blas.describe()}", flush=True)
    spec = WorkerSpec(name="bench", path=str(folder), epoch=1, down="", up="", dtype=args.dtype, speculate="off")
    loaded = load_checked(spec, lambda _stage, _done, _total: None)
    lines: list[tuple[str, ...]] = []
    for way, runs in measure(loaded, args).items():
        first = statistics.median(seen.first_at - seen.long_at for seen in runs)
        worst = statistics.median(max(seen.gaps, default=0.0) for seen in runs)
        cpu = statistics.median(seen.cpu_s for seen in runs)
        rate = statistics.median(seen.tokens / (seen.first_at - seen.long_at) for seen in runs)
        sizes = chunks(runs[0])
        half = args.long_tokens // 2
        until_half = next(at for at, done in enumerate(itertools.accumulate(sizes), 1) if done >= half)
        shown = " ".join(map(str, sizes[:8]))
        lines.append(
            (
                way,
                f"{first:.3f}",
                f"{cpu:.3f}",
                f"{worst * 1e3:.0f}",
                f"{rate:.1f}",
                str(len(sizes)),
                str(until_half),
                shown,
            )
        )
    what = (
        f"{STREAMS} streams, then a prompt of {args.long_tokens} tokens, the first after a restart; {args.turns} turns"
    )
    print(f"\n{args.geometry} {args.dtype}: {what}")
    header = ("kept times", "TTFT s", "CPU s", "longest gap ms", "streams tok/s", "chunks", "to half", "first chunks")
    print(table(header, lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="5m", choices=sorted(models.GEOMETRIES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--drafts", action="store_true", help="with drafts where they pay")
    return parser.parse_args()


if __name__ == "__main__":
    main()
