"""Main function of a worker: it loads, warms up, serves, and exits with a status that gives the reason."""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from protocol import __version__
from protocol.checkpoint import AUDIO, TEXT
from protocol.failures import Code, ExitStatus, Failure
from protocol.from_worker import Goodbye, Loading, Ready, Rejected
from protocol.spec import WorkerSpec, read_spec
from protocol.to_worker import Shutdown
from worker.engine.gauges import Gauges
from worker.errors import (
    LoadFailed,
    PartnerLost,
    RequestInvalid,
    StepFailed,
    WorkerError,
    foreign_code,
    is_fabric_fault,
    is_gpu_fault,
)
from worker.link import GatewayLink

if TYPE_CHECKING:
    from worker.engine.loop import Engine
    from worker.group.coordinator import Coordinator
    from worker.turn_loop import TurnLoop

log = logging.getLogger("mlxd.worker")

# Number of compiler threads: a grammar that takes seconds to compile must not block other grammars.
_COMPILER_THREADS: Final = 2


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns its exit status."""
    parser = argparse.ArgumentParser(prog="worker", description="One mlxd worker; started by the gateway.")
    parser.add_argument("name", help="name of the model, shown in process lists")
    parser.add_argument("--epoch", type=int, help="epoch of this process, shown in process lists")
    parser.add_argument("--rank", type=int, help="rank in its group, shown in process lists")
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    parser.add_argument(
        "--over-ssh",
        metavar="VERSION",
        help="started by this version of mlxd on another machine: the specification is a line, and the process ends "
        "with its standard input",
    )
    options = parser.parse_args(argv)
    is_over_ssh = options.over_ssh is not None
    if is_over_ssh and options.over_ssh != __version__:
        # The specification may have fields that this version does not know, so it is not decoded.
        print(f"ERROR mlxd is {__version__} here and {options.over_ssh} at rank 0: install the same", file=sys.stderr)
        return ExitStatus.INCOMPATIBLE
    try:
        spec = read_spec(options.spec, is_line=is_over_ssh)
        _check(spec)
    except (msgspec.DecodeError, ValueError) as error:
        print(f"worker: bad --spec: {error}", file=sys.stderr)
        return ExitStatus.BAD_CONFIG
    if is_over_ssh:
        threading.Thread(target=_end_with_input, name="ssh", daemon=True).start()
    _prepare_process(spec)
    if spec.rank is not None and spec.rank.rank > 0:
        from worker.group.follower import Follower, follow

        return _end(follow(Follower(spec)))
    status = WorkerMain(spec).run()
    return status if spec.group is None else _end(status)


def _end(status: int) -> int:
    """End the process at once: unfinished collectives of a group may wait for another rank forever."""
    sys.stderr.flush()
    os._exit(status)


def _end_with_input() -> None:
    """End the process when its standard input, an ssh connection, ends: nothing else on this host would end it."""
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(ExitStatus.PARTNER_LOST)


def _check(spec: WorkerSpec) -> None:
    """Check constraints that the types do not express. Raises ValueError."""
    if spec.max_running < 0 or spec.prefill_chunk < 1:
        raise ValueError("max_running is at least 0, prefill_chunk 1")
    if spec.kv_bits not in (0, 4, 8):
        raise ValueError("kv_bits is 8 or 4, or 0 for none")
    if spec.log_level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"unknown log_level '{spec.log_level}'")


def _prepare_process(spec: WorkerSpec) -> None:
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    log.setLevel(spec.log_level.upper())
    # A worker never uses the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Forking is unsafe while threads of tokenizers run, so tokenizers must not start any.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # The CUDA build of MLX caches cuDNN plans of attention, which take 45 ms to build, for each number of rows, of
    # tokens and of cached tokens. MLX raises an error after some hundreds of misses unless the check is disabled.
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "4096")
    os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
    # MLX also caches a CUDA graph for each sequence of operations. Rows of unequal lengths make new sequences, and a
    # short graph is built sooner than a long one: with short graphs, 32 rows had 1.2 to 1.6 times the tokens per second
    # (H100, 8B in bfloat16). On macOS this variable is the size of Metal's command buffers, whose default stays.
    if sys.platform == "linux":
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "20")


class WorkerMain:
    """Connection of link, intake and engine. The engine runs on the main thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._gauges = Gauges()
        self._link = GatewayLink(spec, self._gauges)
        # The coordinator of the model's group; None if the model has no group.
        self._lead: Coordinator | None = None
        self._compilers = ThreadPoolExecutor(_COMPILER_THREADS, thread_name_prefix="compiler")

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Nothing needs saving before the model is loaded, and the main thread may be in native code.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._link.start()
        self._link.send(Loading(self._spec.epoch, "import"))
        try:
            return self._load_and_serve()
        finally:
            self._link.close()
            # Python's exit would otherwise wait for the pool's queue, with the model still in memory.
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _load_and_serve(self) -> int:
        # The imports below take a second, so they come after the first message to the gateway.
        from worker.embedding.load_model import kind_of_spec
        from worker.model import memory

        engine: Engine | TurnLoop[Any] | None = None
        try:
            memory.prepare_load()
            # A missing module is the fault of the installation, not of the model.
            with foreign_code(self._explain, ImportError):
                kind = kind_of_spec(self._spec)
                engine, ready = self._start_text() if kind == TEXT else self._start_jobs(kind)
            signal.signal(signal.SIGTERM, lambda _signum, _frame: self._link.stop(Shutdown("SIGTERM")))
            self._link.announce_ready(ready)
            engine.run()
            if self._lead is not None:
                self._lead.leave()
        except LoadFailed as error:
            return self._leave("load failed", error.failure, error.exit_status)
        except PartnerLost as error:
            if engine is not None:
                engine.fail_all(error.failure)
            return self._leave_group(error.failure, ExitStatus.PARTNER_LOST)
        except Exception as error:  # clients and the gateway must get an answer after any error
            log.exception("the worker failed")
            detail = error.failure.detail if isinstance(error, WorkerError) else repr(error)
            failure = Failure(Code.WORKER_DIED, "the model's worker failed; try again", detail)
            if engine is not None:
                engine.fail_all(failure)
            return self._leave("step loop failed", failure, ExitStatus.INTERNAL)
        return self._leave("asked to stop", None, ExitStatus.OK)

    def _explain(self, error: BaseException) -> WorkerError:
        """Return the failure of a load with an error that no part of it has explained: the next worker would end with
        it too, unless it is a fault of the device or of the connection between ranks.
        """
        from worker.model.loader import explain, read_config, resolve

        log.error("the load failed", exc_info=error)
        if is_gpu_fault(error) or is_fabric_fault(error):
            return StepFailed(Code.WORKER_DIED, "the device failed during the load", detail=repr(error))
        config: dict[str, Any] = {}
        with suppress(LoadFailed, OSError):
            config = read_config(resolve(self._spec.path))
        return explain(Path(self._spec.path), config, error)

    def _start_text(self) -> "tuple[Engine, Ready]":
        from worker.start.start_text import start_text

        engine, ready, self._lead = start_text(
            self._spec, self._link, self._gauges, self._refusing, self._compilers, self._report_progress, self._lose
        )
        return engine, ready

    def _start_jobs(self, kind: str) -> "tuple[TurnLoop[Any], Ready]":
        if self._spec.keep_warm_s:
            raise LoadFailed(Code.BAD_CONFIG, "keep_warm is for models that generate text")
        if kind == AUDIO:
            from worker.start.start_audio import start_audio

            return start_audio(self._spec, self._link, self._gauges, self._refusing, self._report_progress)
        from worker.start.start_embedding import start_embedding

        return start_embedding(self._spec, kind, self._link, self._gauges, self._refusing, self._report_progress)

    @contextmanager
    def _refusing(self, rid: int) -> Generator[None]:
        """Reject a request if the code inside raises."""
        try:
            yield
        except RequestInvalid as error:
            self._link.send(Rejected(rid, error.failure))
        except BaseException as error:  # no error of a request may end the thread, not even a panic in Rust
            log.exception("request %d could not be prepared", rid)
            self._link.send(Rejected(rid, Failure(Code.INTERNAL, "the request could not be prepared", repr(error))))

    def _report_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._link.send(Loading(self._spec.epoch, stage, done_bytes, total_bytes))

    def _lose(self, failure: Failure, status: int) -> None:
        """End the process from the group's watch thread: the main thread may wait for another rank forever."""
        ends_with = self._leave_group(failure, ExitStatus(status))
        self._link.close()
        os._exit(ends_with)

    def _leave_group(self, failure: Failure, status: ExitStatus) -> int:
        """Leave after another rank was lost. This is no failure once this worker was ordered to stop."""
        if self._link.is_stopped:
            return self._leave("asked to stop", None, ExitStatus.OK)
        return self._leave("the group is lost", failure, status)

    def _leave(self, reason: str, failure: Failure | None, status: ExitStatus) -> int:
        if failure is not None:
            log.error("%s: %s %s", reason, failure.message, failure.detail)
        self._link.send(Goodbye(self._spec.epoch, reason, failure))
        return status
