"""Downloads in Ollama's words, of a hub on a socket of this machine."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from gateway.access.caller import Caller
from gateway.access.key import Key, KeyFile
from gateway.api.ollama.endpoints import PullEndpoint, repository_of
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.model_files.pull_queue import PullQueue, PullStatus
from gateway.request.record import RequestRecord
from tests.gateway.harness import Gateway, running
from tests.support.hub import Hub, model_repo

pytestmark = pytest.mark.anyio

MODELS = (ModelConfig(name="here", path="demo"), ModelConfig(name="tiny", path="org/tiny"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def hub(model_folder: Callable[[str], Path]) -> Generator[Hub, None, None]:
    with Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as running_hub:
        yield running_hub


@pytest.fixture
async def gateway(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Gateway, None]:
    for name, value in hub.environ(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    async with running(tmp_path / "h", models=MODELS) as started:
        keys = KeyFile(tmp_path / "h" / "keys" / "keys.json")
        secret = keys.create(Key(name="boss", prefix="", salt="", hash="", is_admin=True))[1]
        started.client.headers["authorization"] = f"Bearer {secret}"
        yield started


async def pull(gateway: Gateway, name: str) -> list[Any]:
    answer = await gateway.client.post("/api/pull", json={"model": name})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_configured_model_is_downloaded_with_its_progress_and_the_next_pull_finds_it(
    gateway: Gateway, tmp_path: Path
) -> None:
    first, *progress, last = await pull(gateway, "tiny:latest")

    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    assert progress[-1]["completed"] == progress[-1]["total"] > 0
    assert progress[-1]["digest"]
    assert list((tmp_path / "cache").rglob("model.safetensors"))
    again = await gateway.client.post("/api/pull", json={"name": "hf.co/org/tiny", "stream": False})
    assert again.json() == {"status": "success"}


async def test_a_download_that_fails_ends_with_the_reason(gateway: Gateway) -> None:
    whole = await gateway.client.post("/api/pull", json={"model": "org/nothing", "stream": False})
    assert whole.status_code == 503
    assert "nothing" in whole.json()["error"]


class Forgetful(PullQueue):
    """Downloads that are not listed once they are ordered."""

    def order(self, repository: str) -> PullStatus:
        return PullStatus("id", repository, "waiting")

    def views(self) -> list[PullStatus]:
        return []


async def test_a_stream_of_a_download_that_is_not_listed_any_more_ends_with_an_error_line(gateway: Gateway) -> None:
    sent: list[Message] = []
    bodies = [{"type": "http.request", "body": b'{"model":"org/tiny"}', "more_body": False}]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    record = RequestRecord("one", "POST", "/api/pull", caller=Caller(key="boss", is_admin=True))
    scope = {"type": "http", "headers": [], "mlxd.record": record}
    services = gateway.app.services
    await PullEndpoint(services, Forgetful(services.tasks, services.config.home))(scope, receive, send)
    assert "not listed any more" in json.loads(sent[-1]["body"])["error"]
    assert (sent[-1]["more_body"], record.outcome) == (False, "pull_not_found")


async def test_a_model_that_is_here_needs_no_download(gateway: Gateway) -> None:
    assert await pull(gateway, "here") == [{"status": "pulling manifest"}, {"status": "success"}]


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:latest", "", "../x", "a/b/c"])
def test_names_of_ollamas_library_are_no_repositories(name: str) -> None:
    with pytest.raises(BadRequest, match="Hugging Face"):
        repository_of(name)


@pytest.mark.parametrize("name", ["org/tiny", "hf.co/org/tiny", "huggingface.co/org/tiny:latest"])
def test_a_repository_may_have_the_names_that_ollama_knows(name: str) -> None:
    assert repository_of(name) == "org/tiny"
