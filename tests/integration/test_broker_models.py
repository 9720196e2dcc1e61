"""The memory broker with real models under real HTTP clients: more models than memory."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil
import pytest

from gateway.link.collector import Collector
from gateway.workers.supervisor.spawn import default_command
from gateway.workers.supervisor.state import WorkerLimits
from protocol.from_worker import Delta
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.pool import Running, config, short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
ModelFolder = Callable[[str], Path]

MIB = 1 << 20
DEADLINE_S = 120
COUNT = 200
ARCHITECTURES = {"plain": "qwen3", "window": "gpt_oss", "hybrid": "qwen3_5"}
# A worker of such a model was measured to hold 60 to 75 MiB at work.
SHARE = 96 * MIB
WORDS = ["ka", "to", "mi", "ra", "sen", "lu", "por", "vi", "de", "an"]


class Daemon(DaemonProcess):
    """With real workers, and a look at its books."""

    def status(self) -> dict[str, Any]:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(self.home / "run" / "admin.sock"))) as admin:
            return admin.get("http://mlxd/v1/status").json()

    def model(self, name: str) -> dict[str, Any]:
        return next(model for model in self.status()["models"] if model["name"] == name)

    def series(self, name: str) -> dict[str, float]:
        """The values of a series by its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith((f"mlxd_{name}{{", f"mlxd_{name} "))]
        return {key.removeprefix(f"mlxd_{name}"): float(value) for key, value in found}


class Footprints:
    """Samples what all workers of a daemon hold together, from outside, in a thread of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.samples: list[int] = []
        self.most_processes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def peak(self) -> int:
        return max(self.samples)

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            held = [_footprint(pid) for pid in self._daemon.worker_pids()]
            self.samples.append(sum(held))
            self.most_processes = max(self.most_processes, sum(each > 0 for each in held))


def _footprint(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def write(home: Path, model_folder: ModelFolder, names: Sequence[str], memory: str, **extra: str) -> None:
    tables = "".join(
        f'[models.{name}]\npath = "{model_folder(ARCHITECTURES[name])}"\nmemory = {SHARE}\n{extra.get(name, "")}\n'
        for name in names
    )
    (home / "mlxd.toml").write_text(f"[server]\nport = 0\n[memory]\n{memory}\n{tables}")


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


def bodies(count: int, models: Sequence[str], seed: int = 5) -> list[dict[str, Any]]:
    """Chat and completions, streamed and whole, short and long, over the models at random."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for index in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.choice([3, 30, 120])))
        body: dict[str, Any] = {"model": rng.choice(models), "max_tokens": rng.randint(5, 40), "temperature": 0}
        body |= {"messages": [{"role": "user", "content": text}]} if index % 2 else {"prompt": text}
        made.append(body | {"stream": True} if index % 3 else body)
    return made


async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of one request; its stream must have ended as it should."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        response = await client.post(path, json=body)
        parts = response.json().get("choices", [])
        return response.status_code, "".join(_text(part) for part in parts)
    text, is_done = "", False
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            is_done |= line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(_text(part) for part in event["choices"])
    assert is_done, "a stream was cut off"
    return response.status_code, text


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta", choice.get("message", choice))
    return part.get("content") or part.get("text") or ""


async def ask_all(url: str, requests: Sequence[dict[str, Any]], concurrency: int) -> list[tuple[int, str]]:
    turn = asyncio.Semaphore(concurrency)

    async def one(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
        async with turn:
            return await ask(client, body)

    async with (
        asyncio.timeout(patient(DEADLINE_S)),
        httpx2.AsyncClient(base_url=url, timeout=patient(DEADLINE_S)) as client,
    ):
        return list(await asyncio.gather(*(one(client, body) for body in requests)))


@pytest.mark.soak
async def test_three_models_and_memory_for_two_serve_many_mixed_requests(home: Path, model_folder: ModelFolder) -> None:
    budget = int(2.4 * SHARE)
    write(home, model_folder, list(ARCHITECTURES), f"budget = {budget}")
    with Daemon(home, module="tests.support.quick_daemon") as daemon, Footprints(daemon) as footprints:
        requests = bodies(COUNT, list(ARCHITECTURES))
        answers = await ask_all(daemon.url, requests, concurrency=48)

        assert Counter(status for status, _ in answers) == {200: COUNT}
        loads, evictions = daemon.series("model_loads_total"), daemon.series("model_evictions_total")
        asked = Counter(body["model"] for body in requests)
        assert min(asked.values()) > COUNT // 5
        assert sum(daemon.series("worker_restarts_total").values()) == 0
        assert sum(daemon.series("worker_recycles_total").values()) == 0
        for name in ARCHITECTURES:
            own_loads = sum(count for labels, count in loads.items() if f'model="{name}"' in labels)
            own_evictions = sum(count for labels, count in evictions.items() if f'model="{name}"' in labels)
            is_resident = daemon.model(name)["state"] == "ready"
            assert own_loads == own_evictions + is_resident, name
        assert sum(loads.values()) > 3
        assert footprints.most_processes == 2
        assert footprints.peak <= budget
        assert min(daemon.series("model_memory_returned_ratio").values()) >= 0.95
        print(f"loads {loads}, peak {footprints.peak / budget:.2f} of the budget, {len(footprints.samples)} samples")


@pytest.mark.soak
async def test_streams_of_a_worker_that_is_started_anew_for_its_memory_equal_their_undisturbed_runs(
    home: Path, model_folder: ModelFolder
) -> None:
    texts = [" ".join(WORDS[i:] * 4) for i in range(4)]
    fields: dict[str, object] = {
        "path": str(model_folder("qwen3")),
        "kv_bytes": 16 * MIB,
        "cache": {"ram_bytes": 0, "disk_bytes": 0},
    }

    async def ids(limits: WorkerLimits, memory: int) -> tuple[list[list[int]], Running]:
        command = default_command
        async with Running(config(home, ("m",), memory_bytes=memory, **fields), command=command, limits=limits) as r:
            async with asyncio.timeout(patient(DEADLINE_S)):
                worker = await r.pool.ensure_ready("m")
                streams = [r.generate(worker, text, max_tokens=400) for text in texts]
                found = [[t for delta in await read(stream) for t in delta.token_ids] for stream in streams]
            r.note_pids()
        return found, r

    expected, calm = await ids(WorkerLimits(), SHARE)
    assert calm.events.recycles == []
    # Less than Python alone takes: nothing that the worker can do will help.
    eager = WorkerLimits(measure_interval_s=0.05, squeeze_s=0.1, creep_s=0.3, creep_bytes=0)
    found, pressed = await ids(eager, 8 * MIB)

    assert pressed.events.recycles == ["m"]
    assert pressed.events.resumes == len(texts)
    assert [len(each) for each in found] == [400] * len(texts)
    assert found == expected


async def read(collector: Collector) -> list[Delta]:
    deltas: list[Delta] = []
    while not collector.is_done:
        deltas += await collector.read_deltas()
    return deltas


def test_a_model_that_can_never_fit_is_refused_in_each_dialect_with_numbers(home: Path) -> None:
    (home / "mlxd.toml").write_text(
        '[server]\nport = 0\n[memory]\nbudget = "100MiB"\n[models.big]\npath = "demo"\nmemory = "3GiB"\n'
    )
    ask = {"model": "big", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with Daemon(home) as daemon:
        for stream in (False, True):
            refused = daemon.client.post("/v1/chat/completions", json=ask | {"stream": stream})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "model_does_not_fit"
            assert "it needs 3.0 GiB, and the memory budget is 100 MiB" in refused.json()["error"]["message"]
            assert "retry-after" not in refused.headers
        claude = daemon.client.post("/v1/messages", json=ask)
        assert claude.status_code in (503, 529)
        assert claude.json()["type"] == "error"
        assert "3.0 GiB" in claude.json()["error"]["message"]
        assert daemon.model("big")["state"] == "stopped"
        assert daemon.series("memory_budget_bytes") == {"": 100.0 * MIB}


def test_who_waits_too_long_for_memory_is_told_so_and_what_made_room_goes_on(home: Path) -> None:
    # Each has its share, so that no worker is started again for holding more.
    (home / "mlxd.toml").write_text(
        '[server]\nport = 0\nqueue_timeout = "1s"\n[memory]\nbudget = "400MiB"\n'
        + "".join(f'[models.{name}]\npath = "demo"\nmemory = "300MiB"\n' for name in "ab")
    )
    # Longer than the other one waits, on any machine.
    body = {"model": "a", "prompt": "hi", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    with Daemon(home) as daemon, ExitStack() as stack:
        assert ctl(home, "load", "a").returncode == 0
        lines = stack.enter_context(daemon.client.stream("POST", "/v1/completions", json=body)).iter_lines()
        next(lines)
        late = daemon.complete(model="b")
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "queue_timeout"
        assert int(late.headers["retry-after"]) > 0
        # Nobody waits for the room any more: the gate is open, and the first stream has not noticed.
        assert daemon.complete(model="a").status_code == 200
        assert daemon.model("a")["epoch"] == 1
        assert daemon.model("b")["state"] == "stopped"
        assert any(line.startswith("data: {") for line in lines)


def test_a_worker_of_an_earlier_gateway_keeps_its_share_and_can_be_sent_away(home: Path) -> None:
    # Each has its share, so that no worker is stopped for holding more.
    (home / "mlxd.toml").write_text(
        '[server]\nport = 0\n[memory]\nbudget = "400MiB"\n'
        + "".join(f'[models.{name}]\npath = "demo"\nmemory = "300MiB"\n' for name in "ab")
    )
    with Daemon(home) as first:
        assert first.complete(model="a").status_code == 200
        pid = first.model("a")["pid"]
        first.kill()
        with Daemon(home) as second:
            assert second.status()["memory"]["granted_bytes"] == 300 * MIB
            assert second.complete(model="a").status_code == 200
            assert second.model("a")["pid"] == pid
            assert second.complete(model="b").status_code == 200
            assert (second.model("a")["state"], second.model("b")["state"]) == ("stopped", "ready")
            assert second.series("model_evictions_total") == {'{model="a",reason="memory"}': 1.0}
