"""A machine that is short of something: descriptors, time, patience. Nothing dies of it that could have gone on."""

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from msgspec.structs import replace

from gateway.main import DaemonExit
from gateway.workers.supervisor.spawn import default_command
from gateway.workers.supervisor.state import State, WorkerLimits
from protocol.to_worker import TextPrompt, Tokenize
from tests.gateway.telemetry.test_metrics import parsed
from tests.support.daemon import DEADLINE_S, DaemonProcess, stream_text, write_config
from tests.support.models import build
from tests.support.pool import Running, config, read_all, short_home, text_of, tokens
from tests.support.scale import patient, scaled

pytestmark = pytest.mark.anyio
ModelFolder = Callable[[str], Path]


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets one process limit another")
def test_a_shortage_of_descriptors_costs_new_connections_only_and_can_be_seen(home: Path) -> None:
    write_config(home)
    with DaemonProcess(home, "--step-ms 5") as daemon:
        assert daemon.complete().status_code == 200
        process = psutil.Process(daemon.process.pid)
        body = {"model": "a", "prompt": "hi", "max_tokens": 400, "stream": True}
        with daemon.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            begun = [next(lines)]
            most = process.num_fds() + 5
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
            used = process.cpu_times()
            address = ("127.0.0.1", int(daemon.url.rpartition(":")[2]))
            # They are in the system's queue: whoever connects now waits for a descriptor.
            waiting = [socket.create_connection(address) for _ in range(30)]
            began = time.monotonic()
            # Two seconds of tokens, in which all that looks at the machine looks.
            text = stream_text([*begun, *lines])
            spent = process.cpu_times()
        busy = (spent.user + spent.system - used.user - used.system) / (time.monotonic() - began)
        for connection in waiting:
            connection.close()

        assert text == tokens(400)
        # An accept that fails is not tried again at once, for ever.
        assert busy < 0.8
        assert daemon.complete().status_code == 200
        found = parsed(daemon.client.get("/metrics").text)
        assert found["process_max_fds{}"] == most
        assert 0 < found["process_open_fds{}"] <= most


def fill(daemon: DaemonProcess, count: int) -> list[socket.socket]:
    """So many connections that say nothing; those that are turned away or give way are closed at the other end only."""
    address = ("127.0.0.1", int(daemon.url.rpartition(":")[2]))
    return [socket.create_connection(address, timeout=patient(DEADLINE_S)) for _ in range(count)]


# Three times as many and 200 are less than the 2,048 that importing mlx-lm leaves this process.
@pytest.mark.parametrize("files", [256, *scaled([512], [])])
def test_clients_cannot_take_the_descriptors_that_workers_and_mlxctl_need(home: Path, files: int) -> None:
    write_config(home, server="trusted_proxies = ['127.0.0.1']")
    admin = httpx2.HTTPTransport(uds=str(home / "run" / "admin.sock"))
    with (
        DaemonProcess(home, "--step-ms 1", files=files) as daemon,
        httpx2.Client(transport=admin, base_url="http://mlxd", timeout=patient(DEADLINE_S)) as mlxctl,
    ):
        # A connection of its own for each: one that is kept is the longest idle, and gives way.
        daemon.client.headers["connection"] = "close"
        process = psutil.Process(daemon.process.pid)
        idle = fill(daemon, files + 200)
        # A worker starts and connects, files are opened, and a client is answered.
        assert daemon.complete(model="a").status_code == 200
        idle += fill(daemon, files)
        assert daemon.complete(model="b").status_code == 200
        assert mlxctl.get("/v1/status").status_code == 200
        os.kill(daemon.worker_pids()[0], signal.SIGKILL)
        idle += fill(daemon, files)
        assert {daemon.complete(model=model).status_code for model in ("a", "b")} == {200}
        assert mlxctl.get("/v1/status").status_code == 200
        shown = parsed(daemon.client.get("/metrics").text)
        assert shown["mlxd_connections{listener=public}"] == shown["mlxd_connections_max{listener=public}"]
        # Part of the reserve is still there.
        assert process.num_fds() < files - 16
        for connection in idle:
            connection.close()


def test_clients_of_the_admin_socket_have_a_bound_of_their_own(home: Path) -> None:
    write_config(home)
    path = str(home / "run" / "admin.sock")
    with DaemonProcess(home, files=256) as daemon:
        idle: list[socket.socket] = []
        for _ in range(200):
            idle.append(socket.socket(socket.AF_UNIX))
            idle[-1].connect(path)
        with httpx2.Client(
            transport=httpx2.HTTPTransport(uds=path), base_url="http://m", timeout=patient(DEADLINE_S)
        ) as mlxctl:
            assert mlxctl.get("/v1/status").status_code == 200
        assert psutil.Process(daemon.process.pid).num_fds() < 128
        for connection in idle:
            connection.close()


def test_a_limit_of_open_files_that_is_too_small_is_said_at_the_start(home: Path) -> None:
    write_config(home)
    daemon = DaemonProcess(home, files=128)

    assert daemon.wait() == DaemonExit.CANNOT_USE
    assert "mlxd: at most 128 files may be open, and mlxd needs 144 for itself" in daemon.new_log()


async def test_a_worker_that_is_starved_for_a_moment_is_left_alone(home: Path) -> None:
    async with Running(config(home), limits=WorkerLimits(heartbeat_s=0.05)) as running:
        worker = await running.ready()
        stream = running.generate(worker, max_tokens=100)
        begun = await stream.read_deltas()
        pid, heard = worker.pid, worker.stats
        os.kill(pid, signal.SIGSTOP)
        # What had been said already, and then nothing.
        begun += await stream.read_deltas(0.5)
        assert not await stream.read_deltas(0.5)
        os.kill(pid, signal.SIGCONT)

        rest = await read_all(stream)
        assert text_of(begun + rest) == tokens(100)
        assert (worker.pid, worker.state, running.events.stuck_workers) == (pid, State.READY, 0)
        assert worker.stats is not heard


@pytest.mark.soak
async def test_a_gateway_that_did_not_run_for_a_while_blames_nobody(home: Path) -> None:
    limits = WorkerLimits(heartbeat_s=0.05, pong_s=patient(0.3), step_s=patient(0.3))
    async with Running(config(home), limits=limits) as running:
        worker = await running.ready()
        stream = running.generate(worker, max_tokens=300)
        pid = worker.pid
        # The machine sleeps, or this process gets no time: the very thing that is tested.
        time.sleep(patient(0.5))  # noqa: ASYNC251

        assert text_of(await read_all(stream)) == tokens(300)
        assert (worker.pid, running.events.stuck_workers) == (pid, 0)


@pytest.mark.soak
async def test_an_aborted_process_leaves_its_stacks_in_the_log_and_its_stream_goes_on(
    home: Path, model_folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    # One token a step: drafts would end the stream before its worker can be.
    plain = config(home, path=str(model_folder("qwen3")), speculate="off")
    async with Running(plain, command=default_command) as running:
        whole = text_of(await running.complete(text="one", max_tokens=600))
        worker = await running.ready()
        stream = running.generate(worker, "one", 600)
        begun = await stream.read_deltas()
        with caplog.at_level("INFO", "worker"):
            os.kill(worker.pid, signal.SIGABRT)
            assert text_of(begun + await read_all(stream)) == whole
        assert running.events.exits == [-signal.SIGABRT]
        assert "Fatal Python error: Aborted" in caplog.text
        assert "worker/engine/loop.py" in caplog.text


@pytest.mark.soak
async def test_a_long_prefill_is_no_stuck_step(home: Path, model_folder: ModelFolder) -> None:
    # A chunk may wait for the machine.
    limits = WorkerLimits(heartbeat_s=0.02, step_s=patient(0.25))
    cold = config(home, path=str(model_folder("qwen3")))
    async with Running(cold, command=default_command, limits=limits) as running:
        worker = await running.ready()
        request = replace(running.request("lorem ipsum dolor " * 220, 3), want_progress=True)
        deltas = await read_all(running.link.submit(worker, [request]))

        usage = deltas[-1].usage
        assert usage is not None
        assert usage.prompt > 2000
        # Longer than a step may take on a quiet machine, in steps that each are shorter.
        assert usage.prefill_ms > 250
        assert running.events.stuck_workers == 0


@pytest.mark.soak
async def test_a_huge_prompt_is_tokenized_beside_the_stream_that_runs(home: Path, tmp_path: Path) -> None:
    model = build("qwen3", tmp_path / "model", max_position_embeddings=1 << 17)
    async with Running(config(home, path=str(model)), command=default_command) as running:
        worker = await running.ready()
        # More than it has said by then, however quick it is: a stream that has ended answers at once, and for ever.
        stream = running.generate(worker, "one", 120_000)
        await stream.read_deltas()
        question = Tokenize(running.link.next_rid(), TextPrompt("lorem ipsum dolor sit amet " * 60_000))
        asking = asyncio.create_task(running.link.call(worker.epoch, question))
        said = 0
        while not asking.done():
            said += len(await stream.read_deltas(0.05))
            await asyncio.sleep(0)
        running.link.abort(stream.rids, "client")

        assert (await asking).count > 256_000
        assert said > 5
