"""Workers on real MLX are killed and replaced under real HTTP clients: each answer is as if nothing had happened."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home, until
from tests.support.scale import patience, patient, scaled

pytestmark = pytest.mark.anyio
ModelFolder = Callable[[str], Path]
DEADLINE_S = 90


@dataclass(slots=True)
class Answer:
    """A finished request, as its client sees it."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: tuple[int, int] | None = None
    errors: list[Any] = field(default_factory=list)
    # The longest time without an event.
    pause_s: float = 0.0

    def add(self, choice: dict[str, Any], text: str | None) -> None:
        self.text += text or ""
        self.finish = choice["finish_reason"] or self.finish
        match choice.get("logprobs"):
            case {"content": list(entries)}:
                self.tokens += [entry["token"] for entry in entries]
                self.logprobs += [entry["logprob"] for entry in entries]
            case {"tokens": list(names), "token_logprobs": list(values)}:
                self.tokens += names
                self.logprobs += values
            case _:
                pass

    @property
    def content(self) -> tuple[object, ...]:
        """All that must be the same in two runs."""
        return self.status, self.text, self.finish, self.tokens, self.usage, self.errors


class Clients:
    """Many requests at once. `received` counts the characters that streams have brought so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.received = 0

    async def run(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        async with (
            asyncio.timeout(patient(DEADLINE_S)),
            httpx2.AsyncClient(base_url=self.url, timeout=patient(DEADLINE_S)) as client,
        ):
            return list(await asyncio.gather(*(self.ask(client, body) for body in bodies)))

    async def ask(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Answer:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = Answer()
        if not body.get("stream"):
            response = await client.post(path, json=body)
            self.take(answer, response.json())
            answer.status = response.status_code
            return answer
        async with client.stream("POST", path, json=body) as response:
            answer.status = response.status_code
            at = time.monotonic()
            is_ended = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_ended = True
                elif line.startswith("data: "):
                    answer.pause_s, at = max(answer.pause_s, time.monotonic() - at), time.monotonic()
                    before = len(answer.text)
                    self.take(answer, json.loads(line[6:]))
                    self.received += len(answer.text) - before
        assert is_ended or answer.errors, "a stream was cut off in silence"
        return answer

    def take(self, answer: Answer, body: dict[str, Any]) -> None:
        if "error" in body:
            answer.errors.append(body["error"])
        for choice in body.get("choices", []):
            part = choice.get("delta", choice.get("message", choice))
            answer.add(choice, part.get("content", part.get("text")))
        if usage := body.get("usage"):
            answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def requests(count: int, max_tokens: int, seed: int = 3) -> list[dict[str, Any]]:
    """Greedy and seeded, chat and completions, streamed and whole, with stop strings and logprobs, in all mixtures."""
    rng = random.Random(seed)
    words = ["ka", "to", "mi", "ra", "sen", "lu", "por", "vi", "de", "an"]
    bodies: list[dict[str, Any]] = []
    for index in range(count):
        text = " ".join(rng.choices(words, k=rng.choice([3, 20, 80])))
        body: dict[str, Any] = {"model": "m", "max_tokens": rng.randint(max_tokens // 2, max_tokens)}
        body |= {"messages": [{"role": "user", "content": text}]} if index % 2 else {"prompt": text}
        body |= {"temperature": 0} if index % 4 < 2 else {"temperature": 0.9, "seed": index, "top_p": 0.95}
        if index % 8 != 7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if index % 3 == 0:
            body["stop"] = ["zz", " ka ka ka"]
        if index % 5 == 0:
            body |= {"logprobs": True, "top_logprobs": 2} if index % 2 else {"logprobs": 2}
        bodies.append(body)
    return bodies


def lasting(count: int) -> int:
    """So many tokens that a stream still runs when a test on a slow machine comes to kill its worker."""
    return round(count * min(patience(), 3))


class Daemon(DaemonProcess):
    """With one model, on real workers."""

    def model(self) -> dict[str, Any]:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(self.home / "run" / "admin.sock"))) as admin:
            (model,) = admin.get("http://mlxd/v1/status").json()["models"]
            return model

    def worker_pid(self) -> int:
        pid = self.model()["pid"]
        assert pid > 0, "0 would be our own process group"
        return pid

    def kill_worker(self, signum: int = signal.SIGKILL) -> None:
        os.kill(self.worker_pid(), signum)

    def is_ready(self, epoch: int) -> bool:
        model = self.model()
        return model["state"] == "ready" and model["epoch"] == epoch

    def counter(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"mlxd_{name}{{"))


@pytest.fixture
def daemon(model_folder: ModelFolder, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with short_home() as home:
        write_config(home, ("m",))
        config = home / "mlxd.toml"
        name, *settings = getattr(request, "param", "qwen3").split("\n")
        model = "\n".join([f'path = "{model_folder(name)}"', *settings])
        config.write_text(config.read_text().replace('path = "demo"', model))
        with Daemon(home, module="gateway.main") as running:
            yield running


async def undisturbed(daemon: Daemon, bodies: list[dict[str, Any]]) -> tuple[list[Answer], int]:
    """The answers, and how many characters came in streams."""
    clients = Clients(daemon.url)
    answers = await clients.run(bodies)
    assert {answer.status for answer in answers} == {200}
    assert not any(answer.errors for answer in answers)
    return answers, clients.received


def check_equal(answers: list[Answer], expected: list[Answer]) -> None:
    for index, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        assert answer.content == other.content, f"request {index}"
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3), f"request {index}"


@pytest.mark.parametrize(
    ("daemon", "count", "kills"),
    scaled(
        [("qwen3", 64, 5), ('qwen3_5\nspeculate = "off"', 16, 2)],
        [('qwen3_5\nspeculate = "off"', 6, 1)],
    ),
    indirect=["daemon"],
)
async def test_streams_of_workers_killed_at_random_moments_equal_their_undisturbed_runs(
    daemon: Daemon, count: int, kills: int
) -> None:
    # So long that after a kill at half of it, and a load, the rest still takes longer than finding that out.
    bodies = requests(count, max_tokens=lasting(300))
    expected, total = await undisturbed(daemon, bodies)
    assert len({answer.text for answer in expected}) > count // 2, "the answers must not all be the same"

    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    rng = random.Random(11)
    for kill in range(kills):
        moment = 0.4 * total * (kill + rng.random()) / kills
        await until(lambda kill=kill: running.done() or daemon.is_ready(epoch=kill + 1), DEADLINE_S)
        # Asked for before the moment: while this process waits for the answer the worker goes on.
        worker_pid = daemon.worker_pid()
        await until(lambda moment=moment: clients.received >= moment or running.done(), DEADLINE_S)
        assert not running.done(), "every kill must hit something"
        os.kill(worker_pid, signal.SIGKILL)
    answers = await running

    check_equal(answers, expected)
    assert daemon.counter("worker_restarts_total") == kills
    assert daemon.counter("request_resumes_total") >= kills
    assert daemon.counter("requests_quarantined_total") == 0
    print("longest pauses", sorted(round(answer.pause_s, 2) for answer in answers)[-3:])


# One token a step: drafts would end all of them before the worker of a fast machine can be killed.
@pytest.mark.soak
@pytest.mark.parametrize("daemon", ['qwen3\nspeculate = "off"'], indirect=True, ids=["qwen3"])
async def test_kills_amid_the_prefill_and_amid_the_load_of_the_successor_are_one_pause(daemon: Daemon) -> None:
    long_prompt = " ".join(["ka to mi ra sen lu por vi"] * 180)
    bodies = [
        {"model": "m", "prompt": long_prompt, "max_tokens": 12, "stream": True, "temperature": 0},
        *requests(3, max_tokens=lasting(600)),
    ]
    expected, _ = await undisturbed(daemon, bodies)
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: daemon.model()["running"] + daemon.model()["waiting"] > 0)
    daemon.kill_worker()
    await until(lambda: daemon.model()["state"] == "loading", DEADLINE_S)
    daemon.kill_worker()
    check_equal(await running, expected)
    assert daemon.model()["epoch"] == 3


@pytest.mark.soak
async def test_a_restart_on_request_is_a_pause_for_sixteen_streams(daemon: Daemon) -> None:
    bodies = requests(16, max_tokens=lasting(200))
    expected, total = await undisturbed(daemon, bodies)
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: clients.received > total // 4, DEADLINE_S)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))) as admin:
        done = await asyncio.to_thread(
            lambda: admin.post("http://mlxd/v1/models/restart", json={"model": "m"}, timeout=patient(DEADLINE_S))
        )
    assert done.json() == {"model": "m", "state": "ready"}
    check_equal(await running, expected)
    assert (daemon.model()["epoch"], daemon.model()["restarts"]) == (2, 0)


@pytest.mark.soak
async def test_a_worker_that_is_ended_politely_behind_our_back_is_a_pause(daemon: Daemon) -> None:
    bodies = requests(6, max_tokens=lasting(400))
    expected, total = await undisturbed(daemon, bodies)
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: clients.received > total // 4, DEADLINE_S)
    daemon.kill_worker(signal.SIGTERM)
    check_equal(await running, expected)
    assert daemon.model()["epoch"] == 2


@pytest.mark.soak
def test_mlxctl_verify_finds_nothing_also_when_it_kills_the_worker(daemon: Daemon) -> None:
    command = [sys.executable, "-P", "-c", "from gateway.ctl import main; main()", "verify", "m", "--kill", "--json"]
    environment = os.environ | {"MLXD_HOME": str(daemon.home)}
    done = subprocess.run(
        [*command, "--tokens", "4"], env=environment, capture_output=True, text=True, timeout=patient(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [check["name"] for check in checks][-3:] == ["resumed", "speculated", "killed worker"]
    assert daemon.counter("request_resumes_total") > 0
