"""A daemon of its own behind keys: what strangers send at it, and what the official clients make of its refusals."""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import anthropic
import openai
import psutil
import pytest

from gateway.access.key import Key, KeyFile
from gateway.middleware.auth import HEALTH
from tests.gateway.harness import Gateway, running
from tests.support.daemon import DaemonProcess, write_config
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# `MLXD_FUZZ=10000` for a long look.
STRANGERS = int(os.environ.get("MLXD_FUZZ", "2000"))
AT_ONCE = 16
DEADLINE_S = 20
# Half a request is waited for by the daemon, but not by its stranger.
SILENCE_S = 0.5
GROWTH_MAX_BYTES = 24 * 1024 * 1024
PATHS = [
    *sorted(HEALTH), "/metrics", "/", "/v1/models", "/v1/models/a", "/v1/chat/completions", "/v1/completions",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/resp_1", "/tokenize", "/detokenize",
    "/v1/status", "/v1/keys/usage", "/v1/models/load", "/admin", "/v1/../livez", "/livez/..%2fv1/models", "//", "*",
]  # fmt: skip
METHODS = ["GET", "POST", "HEAD", "DELETE", "OPTIONS", "PUT", "TRACE", "CONNECT", "PRI", "get", "G\x00T"]


def make(home: Path, name: str, **fields: object) -> str:
    key = Key(name=name, prefix="", salt="", hash="", **fields)  # pyright: ignore[reportArgumentType]
    return KeyFile(home / "keys" / "keys.json").create(key)[1]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


# -- strangers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaemonProcess, None, None]:
    home = tmp_path_factory.mktemp("h")
    write_config(home, server='max_body = "64KiB"')
    with DaemonProcess(home) as started:
        yield started


class Stranger:
    """Requests of somebody who has no key: well-formed, odd, broken and oversized ones, the same for the same seed."""

    def __init__(self, seed: int, secret: str) -> None:
        self._random = random.Random(seed)
        self._secret = secret

    def request(self) -> tuple[str, bytes]:
        """The path that is asked for, empty where nothing can be said, and the bytes."""
        pick = self._random
        if pick.random() < 0.1:
            return "", pick.randbytes(pick.choice((1, 20, 3000)))
        path = pick.choice(PATHS)
        lines = [
            f"{pick.choice(METHODS)} {path} HTTP/{pick.choice(('1.1', '1.1', '1.0', '2.0', '9'))}".encode("latin-1")
        ]
        lines += [b"host: x", *self._credentials()]
        if pick.random() < 0.05:
            lines.append(b"x-padding: " + b"a" * pick.choice((5_000, 70_000, 300_000)))
        if pick.random() < 0.05:
            lines.append(
                pick.choice((b"no colon", b": empty", b"a\x00b: c", b"x" * 9000 + b": y", b"upgrade: websocket"))
            )
        body = self._body()
        said = pick.choice((len(body), len(body), len(body), len(body) + 5, 10**12, -1))
        lines.append(
            pick.choice((b"content-length: %d" % said, b"transfer-encoding: chunked", b"content-type: text/plain"))
        )
        # Unless it is cut off, the end of the request is the end of what is sent.
        data = b"\r\n".join(lines) + b"\r\n\r\n" + body
        return path, data[: pick.randrange(len(data))] if pick.random() < 0.1 else data

    def _credentials(self) -> list[bytes]:
        pick, secret = self._random, self._secret
        wrong = pick.choice((
            secret[:-1], secret + "A", secret[:-1] + ("A" if secret[-1] != "A" else "B"), secret.lower(), secret[:17],
            "", "x", "sk-mlxd-" + "A" * 43, secret * 4, "\xff\x80", "a" * 5000,
        ))  # fmt: skip
        header = pick.choice(("authorization: Bearer ", "x-api-key: ", "authorization: Basic ", "cookie: key=", ""))
        return [(header + wrong).encode("latin-1")] if header else []

    def _body(self) -> bytes:
        pick = self._random
        good = json.dumps({"model": "a", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}).encode()
        return pick.choice(
            (b"", good, good[:-1], pick.randbytes(100), b"[" * 50_000, b"a" * 200_000, b"5\r\nhello\r\n0\r\n\r\n")
        )


async def talk(port: int, data: bytes) -> bytes:
    """Send raw bytes and return the answer, as far as it comes before the daemon closes or is silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        async with asyncio.timeout(SILENCE_S):
            answer = await reader.read(65536)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return answer


async def visit(port: int, first: int, count: int, secret: str) -> int:
    """Send requests of `count` strangers. Returns how many were answered; fails on the first that gets in."""
    queue = iter(range(first, first + count))
    answered = 0

    async def one() -> None:
        nonlocal answered
        for seed in queue:
            path, data = Stranger(seed, secret).request()
            answer = await talk(port, data)
            answered += bool(answer)
            status = answer[9:12]
            assert not answer or status.isdigit(), (seed, answer[:100])
            assert not status.startswith(b"5"), (seed, answer[:300])
            if status.startswith(b"2"):
                assert path in HEALTH, (seed, data[:200], answer[:300])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(one())
    return answered


async def test_no_stranger_gets_in_crashes_anything_or_costs_memory(daemon: DaemonProcess) -> None:
    secret = make(daemon.home, "owner")
    port = int(daemon.url.rpartition(":")[2])
    process = psutil.Process(daemon.process.pid)
    await visit(port, 0, 300, secret)
    before = process.memory_info().rss
    files = process.num_fds()

    answered = await visit(port, 1000, STRANGERS, secret)

    assert answered > STRANGERS / 2
    assert process.memory_info().rss - before < GROWTH_MAX_BYTES
    async with asyncio.timeout(patient(DEADLINE_S)):
        while process.num_fds() > files + 4:  # noqa: ASYNC110 - what is polled for happens in another process
            await asyncio.sleep(0.02)
    headers = {"x-api-key": secret}
    scraper = {"x-api-key": make(daemon.home, "prometheus", is_metrics_only=True)}
    metrics = daemon.client.get("/metrics", headers=scraper).text
    assert "mlxd_unhandled_errors_total 0.0" in metrics
    assert 'mlxd_key_requests_total{key="owner"' not in metrics
    assert not re.search(r'mlxd_requests_total{.*status="[25]', metrics)
    answer = daemon.client.post(
        "/v1/completions", headers=headers, json={"model": "a", "prompt": "hi", "max_tokens": 2}
    )
    assert answer.status_code == 200
    # No stranger has made a model load, and no line tells what was tried as a key.
    assert len(daemon.worker_pids()) == 1
    logged = daemon.new_log() + "".join(path.read_text() for path in (daemon.home / "logs").glob("*.log*"))
    # The audit log names keys by their public beginning, which is 8 characters of the secret.
    assert not re.search(r"sk-mlxd-[\w-]{9}", logged)
    # A few lines a minute are theirs, however many they send.
    refused = [line for line in logged.splitlines() if '"status":401' in line or '"status":429' in line]
    assert 0 < len(refused) < 50
    assert all('"client":"127.0.0.1:' in line for line in refused)
    assert "Invalid HTTP request" not in logged


# -- the official clients --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g")


@pytest.fixture(scope="module")
async def gateway(home: Path) -> AsyncGenerator[Gateway, None]:
    make(home, "first")
    async with running(home, ["--step-ms", "1"]) as running_gateway:
        yield running_gateway


def openai_client(gateway: Gateway, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def ask_openai(client: openai.AsyncOpenAI, model: str = "m", stream: bool = False) -> object:
    return await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=2, stream=stream
    )


async def test_openais_client_knows_each_refusal(gateway: Gateway, home: Path) -> None:
    scoped, slow = make(home, "scoped", models=("other",)), make(home, "slow", rpm=1)
    expired = make(home, "expired", expires=1.0)
    for key in ("wrong", expired):
        async with openai_client(gateway, key) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            with pytest.raises(openai.AuthenticationError):
                await ask_openai(client, stream=True)
    async with openai_client(gateway, scoped) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask_openai(client)
        assert unknown.value.code == "model_not_found"
        assert [model.id async for model in client.models.list()] == []
    async with openai_client(gateway, slow) as client:
        await ask_openai(client)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as limited:
                await ask_openai(client, stream=stream)
            assert limited.value.code == "rate_limit_exceeded"
            assert limited.value.type == "requests"
            assert limited.value.response.headers["x-ratelimit-limit-requests"] == "1"
            assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
            assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60


async def test_a_page_of_the_web_is_a_permission_error_to_openais_client(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway, openai_client(gateway, "x") as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.with_options(default_headers={"origin": "https://evil.example.com"}).models.list()


@pytest.mark.parametrize("way", ["api_key", "auth_token"])
async def test_anthropics_client_knows_each_refusal(gateway: Gateway, home: Path, way: str) -> None:
    slow = make(home, f"slow-{way}", rpm=1)

    async def ask(key: str, model: str = "m") -> object:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, max_retries=0, **{way: key}) as client:
            return await client.messages.create(model=model, max_tokens=2, messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(anthropic.AuthenticationError):
        await ask("wrong")
    await ask(slow)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await ask(slow)
    assert limited.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert int(limited.value.response.headers["retry-after"]) >= 1
    with pytest.raises(anthropic.NotFoundError):
        await ask(make(home, f"scoped-{way}", models=("other",)))
