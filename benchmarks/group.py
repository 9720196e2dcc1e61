"""Step times of one model over several processes, and the outcome of a killed rank.

    python -m benchmarks.group --geometry 5m --ranks 1,2 --backend ring             # on a CPU
    python -m benchmarks.group --geometry qwen3-8b --dtype bfloat16 --backend nccl  # on two GPUs

Each rank is a process of its own, with a GPU of its own where there is CUDA. Weights are random and made in memory.
Rank 0 plans as it does in a worker: a tick is what a stream waits for, with the plan and its confirmation.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import models
from protocol.spec import GroupSpec, WorkerSpec, read_spec

WARM: Final = 8
CHUNK: Final = 512
CHILD: Final = "MLXD_BENCH_RANK"


def main() -> None:
    if os.environ.get(CHILD):
        sys.exit(run_rank())
    args = _arguments()
    print(f"group · {args.geometry} {args.dtype} · {args.backend} · {args.parallel}", flush=True)
    print("ranks  rows  context  prefill tok/s  step p50 ms   p90 ms", flush=True)
    for ranks in args.ranks:
        measure(args, ranks)
    if max(args.ranks) > 1 and not args.no_kill:
        kill(args, max(args.ranks))


def measure(args: argparse.Namespace, ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mlxd-group-") as folder:
        work = {"MLXD_BENCH_RUN": json.dumps([args.rows, args.context, args.steps])}
        processes = start(args, ranks, Path(folder), work)
        wait(processes, args.limit_s)


def kill(args: argparse.Namespace, ranks: int) -> None:
    """Kill the last rank while steps run; print how and when the other ranks end."""
    with tempfile.TemporaryDirectory(prefix="mlxd-group-") as folder:
        ready = Path(folder) / "ready"
        work = {"MLXD_BENCH_RUN": json.dumps([[4], [64], 1_000_000]), "MLXD_BENCH_READY": str(ready)}
        processes = start(args, ranks, Path(folder), work)
        end = time.monotonic() + args.limit_s
        while not ready.exists() and time.monotonic() < end and processes[0].poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        processes[-1].send_signal(signal.SIGKILL)
        for rank, process in enumerate(processes[:-1]):
            try:
                status: int | str = process.wait(90)
            except subprocess.TimeoutExpired:
                status = "still runs after 90 s"
            print(f"rank {ranks - 1} killed: rank {rank} ends with {status} after {time.monotonic() - began:.2f} s")
        stop(processes)


def start(args: argparse.Namespace, ranks: int, folder: Path, work: dict[str, str]) -> "list[subprocess.Popen[bytes]]":
    """Start all ranks as a gateway does."""
    from gateway.workers.supervisor.ranks import ranks_of, variables_of

    config = models.config(models.GEOMETRIES[args.geometry], args.dtype, 0)
    (folder / "config.json").write_text(json.dumps(config))
    group = GroupSpec(("local",) * ranks, args.parallel, args.backend) if ranks > 1 else None
    spec = WorkerSpec("bench", str(folder), 1, "", "", dtype=args.dtype, cache_bytes=0, group=group)
    specs = ranks_of(spec) if group is not None else [spec]
    processes: list[subprocess.Popen[bytes]] = []
    for each in specs:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.group"],
            stdin=subprocess.PIPE,
            env=os.environ | variables_of(each) | work | {CHILD: args.geometry, "NCCL_NVLS_ENABLE": "0"},
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(each))
        process.stdin.close()
        processes.append(process)
    return processes


def wait(processes: "list[subprocess.Popen[bytes]]", limit_s: float) -> None:
    end = time.monotonic() + limit_s
    for rank, process in enumerate(processes):
        try:
            status = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"rank {rank} has not ended within {limit_s:.0f} s")
            break
        if status:
            print(f"rank {rank} ended with {status}")
    stop(processes)


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(30)


# -- one rank ----------------------------------------------------------------------------------------------------------


def run_rank() -> int:
    spec = read_spec("-")
    from worker.group.follower import Follower, follow

    class RandomFollower(Follower):
        def load_part(self, division: Any) -> Any:
            return random_part(spec, division)

    if spec.rank is not None and spec.rank.rank > 0:
        os._exit(follow(RandomFollower(spec)))
    status = 0
    try:
        lead_steps(spec)
    except Exception as error:
        print(f"rank 0: {type(error).__name__}: {error}", flush=True)
        status = 72
    sys.stdout.flush()
    os._exit(status)


def random_part(spec: WorkerSpec, division: Any) -> Any:
    """Make a model of random weights, or this rank's part of it."""
    import mlx.core as mx
    from mlx_lm.models import qwen3

    from worker.model.loader import LoadedModel, nbytes

    config = json.loads((Path(spec.path) / "config.json").read_text())
    mx.random.seed(0)
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, spec.dtype))
    if division is not None:
        division.take(model, config)
    mx.eval(model.parameters())
    vocab = config["vocab_size"]
    return LoadedModel(model, None, Path(spec.path), "qwen3", vocab, 32768, (), nbytes(model))


def lead_steps(spec: WorkerSpec) -> None:
    from worker.engine.batch import Batch
    from worker.group.coordinator import open_group
    from worker.kv.quantized import make_caches
    from worker.kv.spans_and_checkpoints import KvLayout
    from worker.model.batch_mode import BatchMode
    from worker.prefix_cache.cache_and_eviction import PrefixCache

    def lost(failure: Any, status: int) -> None:
        print(f"rank 0 ends with {status}: {failure.message}", flush=True)
        os._exit(status)

    lead = division = None
    if spec.group is not None:
        lead, division = open_group(spec, lost)
    loaded = random_part(spec, division)
    layout = KvLayout.of(lambda: make_caches(loaded.model))
    rows, contexts, steps = json.loads(os.environ["MLXD_BENCH_RUN"])
    for count in rows:
        for context in contexts:
            if lead is not None:
                batch: Batch = lead.batch(loaded.model, (), lead.cache(layout, 0), BatchMode.TOGETHER)
            else:
                batch = Batch(loaded.model, (), PrefixCache(layout, 0), BatchMode.TOGETHER)
            size = spec.group.size if spec.group is not None else 1
            one(batch, size, count, context, steps, loaded.vocab_size)
            batch.close()
    if lead is not None:
        lead.leave()


def one(batch: Any, ranks: int, rows: int, context: int, steps: int, vocab: int) -> None:
    from worker.engine.load_checks import silent_row

    ready = os.environ.get("MLXD_BENCH_READY")
    began = time.perf_counter()
    for row in range(rows):
        prompt = [(row * 7919 + at * 31) % vocab for at in range(context)]
        batch.insert(silent_row(row + 1, prompt, steps + WARM + 2))
    while batch.prefilling:
        batch.step(CHUNK)
    prefill_s = time.perf_counter() - began
    seconds: list[float] = []
    for step in range(steps + WARM):
        if not len(batch):
            break
        if ready is not None and step == WARM:
            Path(ready).touch()
        began = time.perf_counter()
        batch.step(CHUNK)
        seconds.append(time.perf_counter() - began)
    timed = sorted(seconds[WARM:])
    p50, p90 = statistics.median(timed) * 1e3, timed[int(0.9 * (len(timed) - 1))] * 1e3
    rate = rows * context / prefill_s
    print(f"{ranks:>5} {rows:>5} {context:>8} {rate:>14.0f} {p50:>12.2f} {p90:>8.2f}", flush=True)
    for row in batch.rows:
        batch.remove(row)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.group", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="5m", choices=[*models.GEOMETRIES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--backend", default="ring", choices=["ring", "nccl"])
    parser.add_argument("--parallel", default="tensor", choices=["tensor", "pipeline"])
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=_numbers, default=[500, 4000], help="tokens of each row")
    parser.add_argument("--steps", type=int, default=48, help="of one measurement")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of the ranks of one size")
    parser.add_argument("--no-kill", action="store_true", help="leave out the killed rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
