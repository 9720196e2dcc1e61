"""The same failures with the real worker on real MLX: what the scripted one cannot prove."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.config.settings import Config
from gateway.workers.supervisor.spawn import default_command
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerLimits
from protocol.failures import Code
from tests.support.pool import Running, config, read_all, short_home, text_of, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
ModelFolder = Callable[[str], Path]


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


def running(config: Config, limits: WorkerLimits | None = None) -> Running:
    return Running(config, command=default_command, limits=limits)


@pytest.mark.soak
async def test_a_stopped_process_is_noticed_killed_and_replaced_and_its_stream_goes_on(
    home: Path, model_folder: ModelFolder
) -> None:
    limits = WorkerLimits(heartbeat_s=0.1, pong_s=patient(1.5), dump_s=0.1, abort_s=0.5)
    # One token a step: drafts would end the stream before its worker can be stopped.
    async with running(config(home, path=str(model_folder("qwen3")), speculate="off"), limits) as pool:
        whole = text_of(await pool.complete(text="one", max_tokens=600))
        worker = await pool.ready()
        stream = pool.generate(worker, "one", 600)
        begun = await stream.read_deltas()
        os.kill(worker.pid, signal.SIGSTOP)
        assert text_of(begun + await read_all(stream)) == whole
        assert pool.events.stuck_workers == 1


async def test_a_model_that_is_not_there_is_named_and_not_tried_again(home: Path) -> None:
    async with running(config(home, path=str(home / "nothing"))) as pool:
        for _ in range(2):
            with pytest.raises(ModelUnavailable) as caught:
                await pool.pool.ensure_ready("m")
            assert caught.value.failure.code is Code.MODEL_MISSING
            assert caught.value.retry_after_s == 0
        assert pool.pool.worker("m").state is State.FAILED
        assert pool.events.exits == [66]


async def test_a_stop_while_loading_leaves_no_process(home: Path, model_folder: ModelFolder) -> None:
    async with running(config(home, path=str(model_folder("qwen3")))) as pool:
        waiting = asyncio.create_task(pool.pool.ensure_ready("m"))
        worker = pool.pool.worker("m")
        await until(lambda: worker.state is State.LOADING)
        pool.note_pids()
        async with asyncio.timeout(patient(10)):
            await pool.pool.unload("m")
        with pytest.raises(ModelUnavailable):
            await waiting
        assert worker.state is State.STOPPED
        assert len(await pool.complete(text="one", max_tokens=3)) >= 1


async def test_an_abort_frees_the_row_and_unload_exits_cleanly(home: Path, model_folder: ModelFolder) -> None:
    limits = WorkerLimits(heartbeat_s=0.05)
    async with running(config(home, path=str(model_folder("qwen3"))), limits) as pool:
        worker = await pool.ready()
        stream = pool.generate(worker, "one", 100_000)
        await stream.read_deltas()
        pool.link.abort(stream.rids, "client")
        await until(lambda: worker.stats is not None and worker.stats.running == 0)
        await pool.pool.unload("m")
        assert pool.events.exits == [0]
