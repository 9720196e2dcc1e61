"""Start of an audio worker: load, warm up, take requests."""

import time
from collections.abc import Callable

from protocol.checkpoint import AUDIO
from protocol.from_worker import Ready
from protocol.spec import WorkerSpec
from protocol.timing_profile import LoadFacts
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_jobs import AudioLoop, ClipQueue, SampleMemory
from worker.audio.audio_model import load_audio_model
from worker.engine.gauges import Gauges
from worker.engine.scheduling.timing_profile_file import keep_load
from worker.link import GatewayLink
from worker.model import memory
from worker.start.job_intake import Refusing, refused_adapters, start_job_intake


def start_audio(
    spec: WorkerSpec, link: GatewayLink, gauges: Gauges, refusing: Refusing, progress: Callable[[str, int, int], None]
) -> tuple[AudioLoop, Ready]:
    """Return a loop that is ready to run on this thread, and the `Ready` message for the gateway.

    `refusing` has the same meaning as in `TokenizeCalls`. Raises `LoadFailed`.
    """
    started = time.monotonic()
    model = load_audio_model(spec, progress)
    memory.give_back()
    room = SampleMemory()
    loop = AudioLoop(model, spec, link.send, gauges, room)
    progress("warmup", model.weights_bytes, model.weights_bytes)
    warmed = time.monotonic()
    loop.warm_up()
    gauges.measure_memory()
    now = time.monotonic()
    facts = LoadFacts(now - started, now - warmed, model.weights_bytes, gauges.memory_bytes)
    keep_load(spec, model.path, facts, ("mlx-audio",))
    clips = ClipQueue(spec, loop.inbox, room, link.send, gauges, refusing)
    clips.start()
    start_job_intake(spec.epoch, model.weights_bytes, AudioIntake(model, loop.check), clips.put, link, gauges, refusing)
    return loop, Ready(
        epoch=spec.epoch,
        model_path=str(model.path),
        max_context=0,
        # An audio worker computes one request at a time.
        max_running=1,
        vocab_size=0,
        weights_bytes=model.weights_bytes,
        load_s=time.monotonic() - started,
        model_type=model.family,
        has_chat_template=False,
        kind=AUDIO,
        audio=model.info,
        adapters=refused_adapters(spec.adapters),
    )
