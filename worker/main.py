"""A worker's life: introduce, load, warm up, serve, leave with a status that says why."""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import structs

from protocol.failures import Code, Exit, Failure
from protocol.kinds import AUDIO, TEXT
from protocol.messages import Abort, Generate, Goodbye, Loading, MediaInfo, Ready, Rejected, SetAdapters, Shutdown
from protocol.spec import WorkerSpec, read_spec
from protocol.wisdom import FOLDER_ENV, LoadFacts
from worker.engine.gauges import Gauges
from worker.link import Control, Link, Question

if TYPE_CHECKING:
    from worker.cache.block_events import Journal
    from worker.engine.inbox import Inbox
    from worker.engine.loop import Engine
    from worker.engine.row import Row
    from worker.group.lead import Lead
    from worker.jobs.turn_loop import TurnLoop
    from worker.model.loader import Loaded
    from worker.prompt.intake import Intake

log = logging.getLogger("mlxd.worker")

# A grammar can take seconds to compile; one that does must not hold up the others.
_COMPILERS = 2

# Prompt tokens that show what a token of KV costs.
_WARM_UP: Final = 20

# With room for less than this, a model is of no use.
MIN_CONTEXT: Final = 256

# MLX's CUDA build raises when a cache has missed some hundreds of times since the process began: attention has an entry
# for each number of rows, of tokens, and of tokens before them, and a daemon sees them all.
_MISSES_RAISE: Final = "MLX_ENABLE_CACHE_THRASHING_CHECK"


def main(argv: list[str] | None = None) -> int:
    """Run one worker; returns its exit status."""
    parser = argparse.ArgumentParser(prog="worker", description="One mlxd worker; started by the gateway.")
    parser.add_argument("name", help="the model's name, for those who read process lists")
    parser.add_argument("--epoch", type=int, help="of this incarnation, likewise")
    parser.add_argument("--rank", type=int, help="of its group, likewise")
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    options = parser.parse_args(argv)
    try:
        spec = read_spec(options.spec)
        _check(spec)
    except (msgspec.DecodeError, ValueError) as error:
        print(f"worker: bad --spec: {error}", file=sys.stderr)
        return Exit.BAD_CONFIG
    # Read by MLX at its first attention: plans of cuDNN that are kept, each of which takes some 45 ms to build.
    os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "4096")
    _prepare_process(spec)
    if spec.rank is not None and spec.rank.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.rank.gpu
    if spec.rank is not None and spec.rank.rank > 0:
        from worker.group.follower import follow

        return _end(follow(spec))
    status = Process(spec).run()
    return status if spec.group is None else _end(status)


def _end(status: int) -> int:
    """End at once: what is left of a group's steps may wait for another rank forever."""
    sys.stderr.flush()
    os._exit(status)


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
    # A worker never goes to the network, and never forks while tokenizers' threads run.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault(_MISSES_RAISE, "0")


def _media_info(loaded: "Loaded", intake: "Intake") -> MediaInfo | None:
    """Media of a model with towers, or the reason why it takes none; None for a model of text."""
    tower_bytes = loaded.vision.tower.nbytes if loaded.vision is not None else 0
    processor = intake.media_processor
    if processor is None:
        return MediaInfo(tower_bytes, reason=intake.no_media) if intake.no_media else None
    return MediaInfo(tower_bytes, processor.image_tokens, processor.max_pixels)


def _journal(spec: WorkerSpec) -> "Journal | None":
    """Journal of the prefix cache that is published, where that is asked for. Raises `LoadFailed`."""
    if not spec.kv_events:
        return None
    from worker.cache.block_events import Journal
    from worker.errors import LoadFailed
    from worker.kv_publisher import CannotPublish, KvPublisher

    try:
        return Journal(KvPublisher(spec.kv_events, spec.kv_events_replay, spec.kv_events_topic).put)
    except CannotPublish as error:
        raise LoadFailed(Code.BAD_CONFIG, str(error)) from None


def _keep_load(engine: "Engine", loaded: "Loaded", gauges: Gauges, seconds: float, warm_up_s: float) -> None:
    """Keep what the load has shown, for estimates of the next one."""
    if engine.kept is not None:
        cost = engine.kv_cost
        memory_facts = loaded.weights_bytes, gauges.footprint, cost.token_bytes, cost.bytes(1, 0)
        engine.kept.loaded(LoadFacts(seconds, warm_up_s, *memory_facts))


class Process:
    """Wires link, intake and engine together. The main thread is the engine's."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._gauges = Gauges()
        self._link = Link(spec, self._gauges)
        # Of a group, which this process leads.
        self._lead: Lead | None = None
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="compiler")

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Until the model is loaded there is nothing to save, and the main thread may be deep in native code.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._link.start()
        self._link.send(Loading(self._spec.epoch, "import"))
        try:
            return self._load_and_serve()
        finally:
            self._link.close()
            # Python ends when its pools have done all that waits: grammars in vain, beside the model's memory.
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _load_and_serve(self) -> int:
        # Imported here so that the gateway hears from this process before the second that these take.
        from worker.embedding.load_model import kind_of_spec
        from worker.engine.loop import Engine
        from worker.errors import LoadFailed, PartnerLost, WorkerError
        from worker.jobs.turn_loop import TurnLoop
        from worker.model import memory

        engine: Engine | TurnLoop[Any] | None = None
        try:
            memory.prepare_load()
            kind = kind_of_spec(self._spec)
            engine, ready = self._start_text() if kind == TEXT else self._start_jobs(kind)
            signal.signal(signal.SIGTERM, lambda _signum, _frame: self._link.on_control(Shutdown("SIGTERM")))
            self._link.announce_ready(ready, version("mlx"))
            engine.run()
            if self._lead is not None:
                self._lead.leave()
        except LoadFailed as error:
            return self._leave("load failed", error.failure, error.exit_status)
        except Exception as error:  # the root of the process
            log.exception("the worker failed")
            detail = error.failure.detail if isinstance(error, WorkerError) else repr(error)
            failure = Failure(Code.WORKER_DIED, "the model's worker failed; try again", detail)
            if isinstance(error, PartnerLost):
                failure = error.failure
            if engine is not None:
                engine.fail_all(failure)
            status = Exit.PARTNER_LOST if isinstance(error, PartnerLost) else Exit.INTERNAL
            return self._leave("step loop failed", failure, status)
        return self._leave("asked to stop", None, Exit.OK)

    def _start_jobs(self, kind: str) -> "tuple[TurnLoop[Any], Ready]":
        if kind == AUDIO:
            from worker.start_audio import start_audio

            return start_audio(self._spec, self._link, self._gauges, self._refusing, self._report_progress)
        from worker.start_reader import start_reader

        return start_reader(self._spec, kind, self._link, self._gauges, self._refusing, self._report_progress)

    def _start_text(self) -> "tuple[Engine, Ready]":
        from worker.adapters.adapters import adapters_of
        from worker.checked_model import load_checked
        from worker.engine.inbox import Inbox
        from worker.engine.loop import Engine
        from worker.errors import LoadFailed
        from worker.model import memory
        from worker.prompt.intake import Intake
        from worker.prompt.sparse_limits import SparseLimits
        from worker.vision.images import Limits

        started = time.monotonic()
        lead = division = None
        if self._spec.group is not None:
            from worker.group.lead import open_group

            lead, division = open_group(self._spec, self._lose)
            self._lead = lead
        loaded = load_checked(self._spec, self._report_progress, division, lead)
        memory.give_back()
        inbox = Inbox()
        limits = Limits(self._spec.media_bytes, self._spec.media_count, self._spec.media_pixels)
        sparse = SparseLimits(self._spec.sparse_keep, self._spec.sparse_from)
        intake = Intake(loaded, self._spec.parser, limits, memory.allowed(self._spec), sparse)
        # Ranks of a group do the same, whatever was measured here.
        keeps = os.environ.get(FOLDER_ENV, "") if lead is None else ""
        engine = Engine(
            loaded,
            self._spec,
            inbox,
            self._link.send,
            self._gauges,
            intake.writer,
            keeps=keeps,
            partners=lead,
            journal=_journal(self._spec),
        )
        warmed = time.monotonic()
        self._link.send(Loading(self._spec.epoch, "warmup", loaded.weights_bytes, loaded.weights_bytes))
        # A GPU compiles kernels for a whole chunk; a CPU has nothing to compile.
        length = min(_WARM_UP + (self._spec.prefill_chunk if memory.has_gpu() else 0), loaded.max_context - 4)
        fitting = engine.warm_up([token % loaded.vocab_size for token in range(length)])
        if fitting < MIN_CONTEXT:
            raise LoadFailed(
                Code.OUT_OF_MEMORY, f"beside the weights there is memory for only {fitting} tokens of context"
            )
        intake.limit_context(fitting)
        self._gauges.measure_memory()
        _keep_load(engine, loaded, self._gauges, time.monotonic() - started, time.monotonic() - warmed)
        self._gauges.kv_bits = self._spec.kv_bits
        self._gauges.experts = loaded.experts

        adapters = adapters_of(loaded.model)
        self._take_requests(loaded, intake, inbox)
        ready = Ready(
            epoch=self._spec.epoch,
            model_path=str(loaded.path),
            max_context=intake.max_context,
            max_running=engine.max_running,
            vocab_size=loaded.vocab_size,
            weights_bytes=loaded.weights_bytes,
            load_s=time.monotonic() - started,
            model_type=loaded.model_type,
            has_chat_template=intake.has_chat_template,
            lane=loaded.plan.lane,
            lane_reason=loaded.plan.reason,
            modalities=intake.modalities,
            media=_media_info(loaded, intake),
            speculation=engine.speculation,
            kind=TEXT,
            adapters=adapters.infos if adapters is not None else (),
            group=lead.info(loaded.weights_bytes) if lead is not None else None,
            kv_bits=self._spec.kv_bits,
        )
        return engine, ready

    def _take_requests(self, loaded: "Loaded", intake: "Intake", inbox: "Inbox") -> None:
        """From here on, what the link receives goes to the thread that it is for."""
        from worker.prompt.questions import Questions

        requests: SimpleQueue[tuple[Generate, float]] = SimpleQueue()
        questions = Questions(intake, self._link.send, self._refusing, self._gauges)

        def take(request: Question) -> None:
            if isinstance(request, Generate):
                requests.put((request, time.monotonic()))
            else:
                questions.put(request)

        orders: SimpleQueue[SetAdapters] = SimpleQueue()

        def control(command: Control) -> None:
            if isinstance(command, SetAdapters):
                orders.put(command)
                return
            if isinstance(command, Abort):
                command = structs.replace(command, rids=tuple(questions.abort(command.rids)))
            inbox.put(command)

        questions.start()
        threading.Thread(target=self._read_adapters, args=(loaded, orders, inbox), name="adapters", daemon=True).start()
        threading.Thread(target=self._tokenize, args=(intake, requests, inbox), name="intake", daemon=True).start()
        self._link.on_control = control
        self._link.on_question = take

    def _read_adapters(self, loaded: "Loaded", orders: "SimpleQueue[SetAdapters]", inbox: "Inbox") -> None:
        """Files of adapters are read and checked here, where they hold up no row."""
        from worker.adapters.adapters import adapters_of, read_all
        from worker.engine.inbox import AdapterOrder

        adapters = adapters_of(loaded.model)
        assert adapters is not None, "load_checked attaches them"
        while True:
            order = orders.get()
            read = read_all(adapters, order.adapters)
            inbox.put(AdapterOrder(order.call_id, order.adapters, read, self._link.announce_adapters))

    def _tokenize(
        self,
        intake: "Intake",
        requests: "SimpleQueue[tuple[Generate, float]]",
        inbox: "Inbox",
    ) -> None:
        """Requests become rows in order, but for those that wait for the compiler of their grammar."""

        def restrict(row: "Row", request: Generate) -> None:
            with self._refusing(row.rid):
                intake.restrict(row, request)
                inbox.put(row)

        while True:
            request, arrived = requests.get()
            with self._refusing(request.rid):
                row = intake.row(request, arrived)
                if intake.is_restricted(request):
                    self._compilers.submit(restrict, row, request)
                else:
                    inbox.put(row)

    @contextmanager
    def _refusing(self, rid: int) -> Generator[None]:
        """Whatever goes wrong inside is the end of one request."""
        from worker.errors import RequestInvalid

        try:
            yield
        except RequestInvalid as error:
            self._link.send(Rejected(rid, error.failure))
        except BaseException as error:  # one request must never take the thread down, nor may a panic in Rust
            log.exception("request %d could not be prepared", rid)
            message = f"the request could not be prepared: {type(error).__name__}"
            self._link.send(Rejected(rid, Failure(Code.INTERNAL, message, repr(error))))

    def _report_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._link.send(Loading(self._spec.epoch, stage, done_bytes, total_bytes))

    def _lose(self, failure: Failure, status: int) -> None:
        """End the process from a thread of its group: the main thread may wait for another rank forever."""
        self._leave("the group is lost", failure, Exit(status))
        self._link.close()
        os._exit(status)

    def _leave(self, reason: str, failure: Failure | None, status: Exit) -> int:
        if failure is not None:
            log.error("%s: %s %s", reason, failure.message, failure.detail)
        self._link.send(Goodbye(self._spec.epoch, reason, failure))
        return status
