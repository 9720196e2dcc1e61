"""Workers that an earlier gateway has left: which of them are adopted, and the end of the others."""

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

# Between SIGTERM and SIGKILL of a worker that is not adopted: its weights are unknown.
LEFTOVER_GRACE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class AdoptionRefusal:
    """The reason why a worker is stopped, and whether its model is loaded again in its place."""

    reason: str
    is_loaded_again: bool = False


def objection(survivor: Survivor, wanted: WorkerSpec | None) -> AdoptionRefusal | None:
    """The objection to an earlier gateway's worker, by the specification that its model has now; None adopts it."""
    spec = survivor.spec
    if wanted is None:
        return AdoptionRefusal("its model is not configured")
    if spec is None:
        return AdoptionRefusal(f"another version of mlxd started it, and it is loaded again ({survivor.problem})", True)
    if spec.group is not None and not is_local(spec.group):
        return AdoptionRefusal("ranks of it on other machines have ended with the gateway before", True)
    return None if loads_alike(spec, wanted) else AdoptionRefusal("its configuration has changed")


async def stop_leftovers(processes: Sequence[WorkerPort]) -> None:
    """Stop the workers that are not adopted. Returns when the last of them has ended."""
    async with asyncio.TaskGroup() as tasks:
        for process in processes:
            tasks.create_task(_stop(process))


async def _stop(process: WorkerPort) -> None:
    process.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(LEFTOVER_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.signal(signal.SIGKILL)
        await process.wait()
    process.close()
