"""Start of a text worker: load, warm up, take requests.

Intake of text requests: turns them into rows for the engine, and reads adapters from disk.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

from protocol.checkpoint import TEXT
from protocol.failures import Code, Failure
from protocol.from_worker import MediaInfo, Ready
from protocol.spec import WorkerSpec
from protocol.timing_profile import FOLDER_ENV, LoadFacts
from protocol.to_worker import Generate, SetAdapters
from worker.engine.gauges import Gauges
from worker.engine.inbox import AdapterOrder, EngineInbox
from worker.engine.loop import Engine
from worker.engine.row import Row
from worker.errors import LoadFailed
from worker.group.coordinator import Coordinator, open_group
from worker.link import GatewayLink
from worker.model import memory
from worker.model.batch_mode import KERNEL
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of, read_all
from worker.prefix_cache.kv_events import BlockEventLog, CannotPublish, KvPublisher
from worker.prompt.intake import Intake
from worker.prompt.limits_and_truncation import SparseLimits, is_restricted
from worker.prompt.media_prompt import MediaPrompts, NoMedia
from worker.prompt.miss_explainer import MissExplainer
from worker.prompt.tokenize_calls import ExplainMiss
from worker.start.checked_model import load_checked
from worker.start.job_intake import Refusing, start_intake
from worker.vision.images import MediaLimits


def start_text_intake(
    loaded: LoadedModel,
    intake: Intake,
    inbox: EngineInbox,
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    compilers: ThreadPoolExecutor,
    explain: ExplainMiss,
) -> None:
    """Call `start_intake` for a text model. Requests become rows in order, except those that wait for their grammar to
    be compiled or for their questions to be encoded."""
    orders: SimpleQueue[SetAdapters] = SimpleQueue()

    def restrict(row: Row, request: Generate) -> None:
        with refusing(row.rid):
            intake.rules.restrict(row, request)
            inbox.put(row)

    def ask(request: Generate, arrived: float) -> None:
        with refusing(request.rid):
            inbox.put(intake.row(request, arrived))

    def prepare(request: Generate, arrived: float) -> None:
        if request.questions:  # encoding hundreds of questions may take seconds
            compilers.submit(ask, request, arrived)
            return
        row = intake.row(request, arrived)
        if is_restricted(request):
            compilers.submit(restrict, row, request)
        else:
            inbox.put(row)

    threading.Thread(target=_read_adapters, args=(loaded, orders, inbox, link), name="adapters", daemon=True).start()
    start_intake(intake, prepare, orders.put, inbox.put, link, gauges, refusing, explain)


def _read_adapters(
    loaded: LoadedModel, orders: SimpleQueue[SetAdapters], inbox: EngineInbox, link: GatewayLink
) -> None:
    """Read and check adapters on a thread of their own, where they delay no row."""
    adapters = adapters_of(loaded.model)
    assert adapters is not None, "load_checked attaches them"
    while True:
        order = orders.get()
        read = read_all(adapters, order.adapters)
        inbox.put(AdapterOrder(order.call_id, order.adapters, read, link.announce_adapters))


# Number of prompt tokens of the warm-up, which measures the KV cost per token.
_WARM_UP_TOKENS: Final = 20
# A model is refused if memory only suffices for a shorter context than this.
MIN_CONTEXT: Final = 256


def start_text(
    spec: WorkerSpec,
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    compilers: ThreadPoolExecutor,
    progress: Callable[[str, int, int], None],
    lose: Callable[[Failure, int], None],
) -> tuple[Engine, Ready, Coordinator | None]:
    """Return an engine that is ready to run on this thread, the message for the gateway, and the group's coordinator.

    `refusing` has the same meaning as in `TokenizeCalls`, `lose` as in `open_group`; `compilers` compile grammars.
    Raises `LoadFailed`.
    """
    started = time.monotonic()
    lead, division = open_group(spec, lose) if spec.group is not None else (None, None)
    loaded = load_checked(spec, progress, division, lead)
    memory.give_back()
    inbox = EngineInbox()
    limits = MediaLimits(spec.media_bytes, spec.media_count, spec.media_pixels)
    sparse = SparseLimits(spec.sparse_keep, spec.sparse_from)
    intake = Intake(loaded, spec.parser, limits, memory.allowed(spec), sparse)
    # Ranks of a group keep no measurements from start to start, because all ranks must make the same decisions.
    keeps = os.environ.get(FOLDER_ENV, "") if lead is None else ""
    journal = _journal(spec)
    engine = Engine(
        loaded, spec, inbox, link.send, gauges, intake.writer, keeps=keeps, rank_peers=lead, journal=journal
    )
    warmed = time.monotonic()
    progress("warmup", loaded.weights_bytes, loaded.weights_bytes)
    intake.limit_context(_warm_up(engine, spec, loaded))
    gauges.measure_memory()
    _keep_load(engine, loaded, gauges, time.monotonic() - started, time.monotonic() - warmed)
    gauges.kv_bits, gauges.experts = spec.kv_bits, loaded.experts
    gauges.attention_kernel = int(loaded.plan.attention == KERNEL)
    intake.recent.is_on = lambda: engine.cache.is_on
    explain = MissExplainer(intake.recent, engine.cache, intake.vocabulary.decode).explain
    start_text_intake(loaded, intake, inbox, link, gauges, refusing, compilers, explain)
    return engine, _ready(spec, engine, loaded, intake, lead, time.monotonic() - started), lead


def _warm_up(engine: Engine, spec: WorkerSpec, loaded: LoadedModel) -> int:
    """Warm up, and return the longest sequence that fits memory, in tokens. Raises `LoadFailed`."""
    # A GPU compiles kernels for a whole chunk; a CPU compiles nothing.
    length = min(_WARM_UP_TOKENS + (spec.prefill_chunk if memory.has_gpu() else 0), loaded.max_context - 4)
    fitting = engine.warm_up([token % loaded.vocab_size for token in range(length)])
    if fitting < MIN_CONTEXT:
        raise LoadFailed(Code.OUT_OF_MEMORY, f"beside the weights there is memory for only {fitting} tokens of context")
    return fitting


def _ready(
    spec: WorkerSpec, engine: Engine, loaded: LoadedModel, intake: Intake, lead: Coordinator | None, load_s: float
) -> Ready:
    adapters = adapters_of(loaded.model)
    return Ready(
        epoch=spec.epoch,
        model_path=str(loaded.path),
        max_context=intake.max_context,
        max_running=engine.max_running,
        vocab_size=loaded.vocab_size,
        weights_bytes=loaded.weights_bytes,
        load_s=load_s,
        model_type=loaded.model_type,
        has_chat_template=intake.media.renderer.has_template,
        batch_mode=loaded.plan.mode,
        batch_mode_reason=loaded.plan.reason,
        modalities=intake.media.modalities,
        media=_media_info(loaded, intake.media),
        speculation=engine.speculation,
        kind=TEXT,
        adapters=adapters.infos if adapters is not None else (),
        group=lead.info(loaded.weights_bytes) if lead is not None else None,
        kv_bits=spec.kv_bits,
        attention=loaded.plan.attention,
    )


def _media_info(loaded: LoadedModel, media: MediaPrompts | NoMedia) -> MediaInfo | None:
    """Return the media that a model with towers takes, or the reason why it takes none; None for a text model."""
    tower_bytes = loaded.vision.tower.nbytes if loaded.vision is not None else 0
    if isinstance(media, NoMedia):
        return MediaInfo(tower_bytes, reason=media.reason) if media.reason else None
    return MediaInfo(tower_bytes, media.processor.image_tokens, media.processor.max_pixels)


def _journal(spec: WorkerSpec) -> BlockEventLog | None:
    """Open the published event log of the prefix cache, if it is configured. Raises `LoadFailed`."""
    if not spec.kv_events:
        return None
    try:
        return BlockEventLog(KvPublisher(spec.kv_events, spec.kv_events_replay, spec.kv_events_topic).put)
    except CannotPublish as error:
        raise LoadFailed(Code.BAD_CONFIG, str(error)) from None


def _keep_load(engine: Engine, loaded: LoadedModel, gauges: Gauges, seconds: float, warm_up_s: float) -> None:
    """Store the measurements of this load, for estimates of the next load."""
    if engine.kept is not None:
        cost = engine.kv_cost
        memory_facts = loaded.weights_bytes, gauges.memory_bytes, cost.token_bytes, cost.bytes(1, 0)
        engine.kept.write_load(LoadFacts(seconds, warm_up_s, *memory_facts))
