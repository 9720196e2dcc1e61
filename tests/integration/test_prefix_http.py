"""Prefix caches over HTTP, on real workers: what they save, in counted cached tokens, and what they must never do."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import Key, KeyFile
from tests.support import disk
from tests.support.daemon import DaemonProcess
from tests.support.models import VOCAB
from tests.support.pool import short_home, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
ModelFolder = Callable[[str], Path]
DEADLINE_S = 90
RAM, DISK = 400_000, 1_500_000
WAVES, WAVE, KILLS_AFTER = 10, 50, (60, 170, 280, 390)
SYSTEM = "mira kato sen luto por vide anka tomi " * 6
TOOL = {"name": "read", "description": "Reads a line.", "input_schema": {"type": "object", "properties": {}}}


def started(home: Path, tables: str, module: str = "gateway.main") -> DaemonProcess:
    (home / "mlxd.toml").write_text(f"[server]\nport = 0\n{tables}")
    return DaemonProcess(home, module=module)


def number(daemon: DaemonProcess, name: str, *labels: str) -> float:
    """The sum of a metric of the model `m`."""
    lines = daemon.client.get("/metrics").text.splitlines()
    wanted = [line for line in lines if re.match(rf'mlxd_{name}{{.*model="m"', line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted if all(label in line for label in labels))


# -- many requests, little room --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Storm:
    """Random requests of a few kinds; `told` counts those that were answered or given up."""

    url: str
    expected: list[tuple[str, str]]
    bodies: list[dict[str, Any]]
    rng: random.Random
    told: int = 0
    aborted: int = 0

    async def wave(self, count: int) -> None:
        async with httpx2.AsyncClient(base_url=self.url, timeout=patient(DEADLINE_S)) as client:
            await asyncio.gather(*(self._one(client) for _ in range(count)))

    async def _one(self, client: httpx2.AsyncClient) -> None:
        kind = self.rng.randrange(len(self.bodies))
        if self.rng.random() < 0.2:
            body = self.bodies[kind] | {"model": "m", "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_bytes())
            self.aborted += 1
        else:
            assert await complete(client, self.bodies[kind] | {"model": "m"}) == self.expected[kind]
        self.told += 1


async def complete(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["finish_reason"]


def kinds(count: int, rng: random.Random) -> list[dict[str, Any]]:
    parts = [[rng.randrange(10, VOCAB) for _ in range(rng.randrange(20, 70))] for _ in range(6)]
    prompts = [list(chain.from_iterable(rng.choices(parts, k=rng.randrange(1, 5)))) for _ in range(count)]
    return [
        {"prompt": prompt, "max_tokens": 8, "seed": at, "temperature": 0.9 if at % 2 else 0}
        for at, prompt in enumerate(prompts)
    ]


@pytest.mark.soak
async def test_many_requests_with_aborts_and_kills_stay_within_small_budgets(model_folder: ModelFolder) -> None:
    path = model_folder("qwen3_5")  # it keeps KV and checkpoints
    same = f'path = "{path}"'
    tables = (
        f"[models.m]\n{same}\ncache = {{ ram = {RAM}, disk = {DISK} }}\n"
        f"[models.plain]\n{same}\ncache = {{ ram = 0, disk = 0 }}\n"
    )
    rng = random.Random(5)
    bodies = kinds(30, rng)
    with short_home() as home, started(home, tables, "tests.support.eager_disk_daemon") as daemon:
        folder = home / "cache" / "prefix"
        async with httpx2.AsyncClient(base_url=daemon.url, timeout=patient(DEADLINE_S)) as client:
            expected = [await complete(client, body | {"model": "plain"}) for body in bodies]
        assert not list(folder.glob("*/*")), "a model without a cache writes nothing"
        storm = Storm(daemon.url, expected, bodies, rng)
        kills = list(KILLS_AFTER)
        for _ in range(WAVES):
            wave = asyncio.create_task(storm.wave(WAVE))
            while not wave.done():
                if kills and storm.told >= kills[0] and (pid := worker_pid(daemon)):
                    os.kill(pid, signal.SIGKILL)
                    del kills[0]
                assert disk.size(folder) <= DISK
                await asyncio.wait({wave}, timeout=0.05)
            await wave
            assert number(daemon, "worker_memory_bytes", 'kind="prefix_cache"') <= RAM
        assert not kills
        assert storm.aborted > WAVES * WAVE // 10
        await until(lambda: number(daemon, "num_requests_running") + number(daemon, "num_requests_waiting") == 0)
        await until(lambda: number(daemon, "prefix_cache_disk_bytes") == on_disk(folder), DEADLINE_S)
        assert number(daemon, "worker_restarts_total") == len(KILLS_AFTER)
        assert number(daemon, "prefix_cache_disk_quarantined_total") == 0
        assert number(daemon, "prefix_cache_disk_hits_total") > 0
        assert number(daemon, "requests_quarantined_total") == 0


def worker_pid(daemon: DaemonProcess) -> int:
    """0 while there is none."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))) as admin:
        models = admin.get("http://mlxd/v1/status").json()["models"]
    return next(model["pid"] for model in models if model["name"] == "m")


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in disk.files(folder))


# -- tenants and clients ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def daemon(model_folder: ModelFolder) -> Iterator[DaemonProcess]:
    table = f'[models.m]\npath = "{model_folder("qwen3")}"\n'
    with short_home() as home, started(home, table) as running:
        yield running


def key(daemon: DaemonProcess, name: str, **settings: Any) -> dict[str, str]:
    """Headers of a new key."""
    blank = Key(name=name, prefix="", salt="", hash="")
    secret = KeyFile(daemon.home / "keys" / "keys.json").create(blank, **settings)[1]
    return {"authorization": f"Bearer {secret}"}


def cached(daemon: DaemonProcess, headers: dict[str, str], prompt: list[int], **fields: Any) -> int:
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = daemon.client.post("/v1/completions", json=body, headers=headers, timeout=patient(DEADLINE_S))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_a_cache_only_where_their_keys_and_requests_say_so(daemon: DaemonProcess) -> None:
    prompt = [20 + at * 7 % 400 for at in range(200)]
    ada, bob = key(daemon, "ada"), key(daemon, "bob")
    carl, dora = key(daemon, "carl", shares_cache=True), key(daemon, "dora", shares_cache=True)
    assert [cached(daemon, who, prompt) for who in (ada, ada, bob, bob)] == [0, 199, 0, 199]
    assert [cached(daemon, who, prompt) for who in (carl, dora, ada)] == [0, 199, 199]
    # A request's own salt parts what its key shares, and joins nobody else's.
    salted = {"cache_salt": "x"}
    assert [cached(daemon, who, prompt, **salted) for who in (ada, ada, bob, carl, dora)] == [0, 199, 0, 0, 199]
    assert cached(daemon, dora, prompt, cache_salt="y") == 0


def test_a_chat_of_claude_code_is_found_again_in_spite_of_its_noise(daemon: DaemonProcess) -> None:
    """Its first system block differs in every request, and `cache_control` is always on the newest message."""
    headers = key(daemon, "claude")
    messages: list[dict[str, Any]] = []
    before = 0
    for turn in range(10):
        for message in messages:
            for block in message["content"]:
                block.pop("cache_control", None)
        mark = {"cache_control": {"type": "ephemeral"}}
        if turn % 2:  # the last answer is said to have been a call, and this is its result
            call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "read", "input": {"line": turn}}
            messages[-1]["content"].append(call)
            block = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"{turn} sen lu", **mark}
        else:
            block = {"type": "text", "text": f"{turn} kato sen mira por vi de an?", **mark}
        messages.append({"role": "user", "content": [block]})
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn * 7919:05x};"
        body = {
            "model": "m",
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": SYSTEM, **mark}],
            "messages": messages,
            "tools": [TOOL],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = daemon.client.post("/v1/messages", json=body, headers=headers, timeout=patient(DEADLINE_S)).json()
        usage = answer["usage"]
        assert usage["cache_read_input_tokens"] >= 0.95 * before
        before = usage["input_tokens"] + usage["cache_read_input_tokens"]
        said = "".join(block.get("text", "") for block in answer["content"]) or "mira"
        messages.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
    assert before > 400
