"""Workers that an earlier gateway left running: reasons not to adopt them, and how they are stopped."""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config.worker_spec import loads_alike
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.ranks import is_local
from gateway.workers.supervisor.registry import Survivor
from protocol.spec import WorkerSpec

# A worker that is not adopted gets SIGKILL this long after SIGTERM, whatever the size of its weights.
ORPHAN_GRACE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class AdoptionRefusal:
    """Reason why a worker is stopped, and whether its model is loaded again."""

    reason: str
    is_loaded_again: bool = False


def adoption_refusal(survivor: Survivor, wanted: WorkerSpec | None) -> AdoptionRefusal | None:
    """Return why a surviving worker does not match its configured specification; None if it can be adopted."""
    spec = survivor.spec
    if wanted is None:
        return AdoptionRefusal("its model is not configured")
    if spec is None:
        return AdoptionRefusal(f"{survivor.problem}, and its model is loaded again", True)
    if spec.group is not None and not is_local(spec.group):
        return AdoptionRefusal("ranks of it on other machines have ended with the gateway before", True)
    return None if loads_alike(spec, wanted) else AdoptionRefusal("its configuration has changed")


async def stop_orphans(processes: Sequence[WorkerPort]) -> None:
    """Stop the workers that are not adopted, and wait for their exits."""
    async with asyncio.TaskGroup() as tasks:
        for process in processes:
            tasks.create_task(_stop(process))


async def _stop(process: WorkerPort) -> None:
    process.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(ORPHAN_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.signal(signal.SIGKILL)
        await process.wait()
    process.close()
