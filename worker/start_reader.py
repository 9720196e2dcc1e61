"""Start of a worker for embeddings or scores: load, warm up, take requests."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue

from protocol.failures import Code, Failure
from protocol.messages import Abort, AdapterInfo, AdaptersSet, Generate, Ready, SetAdapters
from protocol.spec import USUAL_RUNNING, WorkerSpec
from worker.embedding.job_loop import Command, JobLoop
from worker.embedding.load_model import Reader, load_reader
from worker.embedding.prepare import Preparer
from worker.engine.gauges import Gauges
from worker.link import Control, Link, Question
from worker.model import memory
from worker.prompt.questions import Questions

Refusing = Callable[[int], AbstractContextManager[None]]


def start_reader(
    spec: WorkerSpec,
    kind: str,
    link: Link,
    gauges: Gauges,
    refusing: Refusing,
    progress: Callable[[str, int, int], None],
) -> tuple[JobLoop, Ready]:
    """A loop that is ready to run, on this thread, and what the gateway is told of it.

    `refusing` is as for `Questions`. Raises `LoadFailed`.
    """
    started = time.monotonic()
    reader = load_reader(spec, kind, progress)
    memory.give_back()
    inbox: SimpleQueue[Command] = SimpleQueue()
    loop = JobLoop(reader, spec, inbox, link.send, gauges)
    progress("warmup", reader.weights_bytes, reader.weights_bytes)
    loop.warm_up()
    gauges.measure_memory()
    _take_requests(spec, reader, inbox, link, gauges, refusing)
    return loop, _ready(spec, reader, time.monotonic() - started)


def _take_requests(
    spec: WorkerSpec,
    reader: Reader,
    inbox: "SimpleQueue[Command]",
    link: Link,
    gauges: Gauges,
    refusing: Refusing,
) -> None:
    """From here on, what the link receives goes to the thread that it is for."""
    preparer, weights_bytes = Preparer(reader), reader.weights_bytes
    requests: SimpleQueue[tuple[Generate, float]] = SimpleQueue()
    questions = Questions(preparer, link.send, refusing, gauges)

    def prepare() -> None:
        while True:
            request, arrived = requests.get()
            with refusing(request.rid):
                inbox.put(preparer.job(request, arrived))

    def take(request: Question) -> None:
        if isinstance(request, Generate):
            requests.put((request, time.monotonic()))
        else:
            questions.put(request)

    def control(command: Control) -> None:
        if isinstance(command, SetAdapters):
            refused = _refused(command.adapters)
            link.announce_adapters(AdaptersSet(spec.epoch, command.call_id, refused, weights_bytes))
            return
        inbox.put(Abort(tuple(questions.abort(command.rids))) if isinstance(command, Abort) else command)

    questions.start()
    threading.Thread(target=prepare, name="intake", daemon=True).start()
    link.on_control = control
    link.on_question = take


def _ready(spec: WorkerSpec, reader: Reader, load_s: float) -> Ready:
    return Ready(
        epoch=spec.epoch,
        model_path=str(reader.path),
        max_context=reader.max_context,
        max_running=spec.max_running or USUAL_RUNNING,
        vocab_size=reader.vocab_size,
        weights_bytes=reader.weights_bytes,
        load_s=load_s,
        model_type=reader.model_type,
        has_chat_template=False,
        kind=reader.kind,
        embedding=reader.embedding,
        adapters=_refused(spec.adapters),
    )


def _refused(adapters: tuple[tuple[str, str], ...]) -> tuple[AdapterInfo, ...]:
    why = "cannot be served: adapters are for models that generate text"
    failures = {name: Failure(Code.UNSUPPORTED, f"the adapter {name!r} {why}") for name, _ in adapters}
    return tuple(AdapterInfo(name, path, failure=failures[name]) for name, path in adapters)
