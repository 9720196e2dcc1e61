"""Start of an embedding or scoring worker: load, warm up, take requests."""

import time
from collections.abc import Callable

from protocol.from_worker import Ready
from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from protocol.timing_profile import LoadFacts
from worker.embedding.intake_and_loop import JobLoop, Preparer
from worker.embedding.load_model import EmbeddingModel, load_embedding_model
from worker.engine.gauges import Gauges
from worker.engine.scheduling.timing_profile_file import keep_load
from worker.link import GatewayLink
from worker.model import memory
from worker.start.job_intake import Refusing, refused_adapters, start_job_intake


def start_embedding(
    spec: WorkerSpec,
    kind: str,
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    progress: Callable[[str, int, int], None],
) -> tuple[JobLoop, Ready]:
    """Return a loop that is ready to run on this thread, and the `Ready` message for the gateway.

    `refusing` has the same meaning as in `TokenizeCalls`. Raises `LoadFailed`.
    """
    started = time.monotonic()
    reader = load_embedding_model(spec, kind, progress)
    memory.give_back()
    loop = JobLoop(reader, spec, link.send, gauges)
    progress("warmup", reader.weights_bytes, reader.weights_bytes)
    warmed = time.monotonic()
    loop.warm_up()
    gauges.measure_memory()
    now = time.monotonic()
    keep_load(spec, reader.path, LoadFacts(now - started, now - warmed, reader.weights_bytes, gauges.memory_bytes))
    start_job_intake(spec.epoch, reader.weights_bytes, Preparer(reader), loop.inbox.put, link, gauges, refusing)
    return loop, _ready(spec, reader, time.monotonic() - started)


def _ready(spec: WorkerSpec, reader: EmbeddingModel, load_s: float) -> Ready:
    return Ready(
        epoch=spec.epoch,
        model_path=str(reader.path),
        max_context=reader.max_context,
        max_running=spec.max_running or DEFAULT_MAX_RUNNING,
        vocab_size=reader.vocab_size,
        weights_bytes=reader.weights_bytes,
        load_s=load_s,
        model_type=reader.model_type,
        has_chat_template=False,
        kind=reader.kind,
        embedding=reader.embedding,
        adapters=refused_adapters(spec.adapters),
    )
