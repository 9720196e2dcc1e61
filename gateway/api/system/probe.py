"""Deep health check: generates one token with each loaded model.

A probe does not count in any admission queue, key or metric of requests, loads no model, and does not delay the unload
of an idle model. Only the worker's token counts include it.
"""

import asyncio
import struct
import time
from typing import Final

from gateway.access.caller import OWNER
from gateway.control_types import DeepHealth, Probe
from gateway.errors import Forbidden, Unauthorized
from gateway.link.collector import Collector
from gateway.link.wire import WorkerGone
from gateway.request.record import RequestRecord
from gateway.services import Services
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import State
from protocol.from_worker import Finish, Ready
from protocol.kinds import AUDIO, EMBED, RERANK
from protocol.prompts import EmbedPrompt, Prompt, ScorePrompt, SpeechPrompt, TextPrompt, TranscribePrompt
from protocol.to_worker import Generate, Sampling

DEADLINE_S: Final = 10.0
POLL_S: Final = 0.05
# Requests with a lower number run first. This number is lower than any key's, so a probe runs before all other
# requests.
PROBE_PRIORITY: Final = -1_000_000
BROKEN: Final = frozenset({State.BACKOFF, State.FAILED, State.INCOMPATIBLE})
# No key uses this salt of the prefix cache.
PROBE_SALT: Final = "health"
_PROMPTS: Final[dict[str, Prompt]] = {
    EMBED: EmbedPrompt(("Hi",)),
    RERANK: ScorePrompt(("Hi",), ("Hi",)),
    AUDIO: SpeechPrompt("Hi."),
}
_SPEECH_WITH_INSTRUCTIONS: Final = SpeechPrompt("Hi.", instructions="A calm voice.")
# A clip of silence: 0.25 s at 16 kHz.
_SAMPLES: Final = bytes(8000)
_SILENCE: Final = TranscribePrompt(
    b"RIFF"
    + struct.pack(
        "<I4s4sIHHIIHH4sI", 36 + len(_SAMPLES), b"WAVE", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", 8000
    )
    + _SAMPLES
)


def require_admin(record: RequestRecord) -> None:
    """Raises `Unauthorized` or `Forbidden` unless the caller is an admin, because a probe costs a step of
    every model.
    """
    caller = record.caller
    if caller.is_admin:
        return
    if caller.key is None:
        raise Unauthorized("Deep health needs an admin key: mlxctl keys create NAME --admin", None)
    raise Forbidden("Deep health needs an admin key.")


async def examine(services: Services, model: str | None = None, deadline_s: float = DEADLINE_S) -> DeepHealth:
    """Probe all loaded models, or only `model`, concurrently. Raises `ModelNotFound`."""
    names = [view.name for view in services.pool.workers() if view.state is State.READY]
    if model is not None:
        names = [services.router.resolve(model, OWNER).name]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_probe(services, services.pool.worker(name), deadline_s)) for name in names]
    probes = [task.result() for task in running]
    is_good = all(probe.ok for probe in probes)
    return DeepHealth("healthy" if is_good else "unhealthy", probes)


async def _probe(services: Services, worker: WorkerHandle, deadline_s: float) -> Probe:
    began = time.perf_counter()
    steps = _steps(worker)
    error = ""
    try:
        async with asyncio.timeout(deadline_s):
            # A worker takes no requests while another model needs its memory, or while it runs only a request that may
            # crash it.
            while worker.state is State.READY and not worker.is_ready:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(POLL_S)
            if worker.state is not State.READY:
                return Probe(worker.name, worker.state not in BROKEN, str(worker.state), 0.0, "")
            error = await _one_token(services, worker)
    except WorkerGone:
        error = "its worker cannot be reached"
    except TimeoutError:
        if _steps(worker) != steps:
            # Other requests occupied all rows, and their steps show that the model works.
            return Probe(worker.name, True, "busy", _ms(began), "")
        error = f"no token within {deadline_s:g} s"
    return Probe(worker.name, not error, "failed" if error else "ready", _ms(began), error)


async def _one_token(services: Services, worker: WorkerHandle) -> str:
    """Generate one token, vector, score or clip. Returns the error, or an empty string. Raises `WorkerGone`."""
    link = services.link
    request = Generate(
        link.next_rid(),
        prompt_for(worker.ready),
        Sampling(temperature=0.0),
        max_tokens=1,
        priority=PROBE_PRIORITY,
        cache_salt=PROBE_SALT,
    )
    collector = link.submit(worker, [request])
    try:
        return await _ending(collector)
    finally:
        link.abort(collector.rids, "health")


def prompt_for(ready: Ready | None) -> Prompt:
    """Return the smallest prompt for a model of this kind."""
    audio = ready.audio if ready is not None else None
    if audio is not None and audio.transcribes:
        return _SILENCE
    if audio is not None and audio.needs_instructions:
        return _SPEECH_WITH_INSTRUCTIONS
    return _PROMPTS.get(ready.kind if ready is not None else "", TextPrompt("Hi"))


async def _ending(collector: Collector) -> str:
    while True:
        for delta in await collector.read_deltas():
            if delta.finish in (Finish.ERROR, Finish.ABORT):
                return delta.failure.message if delta.failure is not None else "it was aborted"
            if delta.finish is not None:
                return ""


def _steps(worker: WorkerHandle) -> tuple[int, int]:
    return worker.epoch, worker.stats.step_seq if worker.stats is not None else 0


def _ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 1)
