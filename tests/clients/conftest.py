"""An agent's workshop: a gateway whose model plays along, a folder with something to find, a clean environment."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.config.settings import ModelConfig
from tests.clients.install import node_path
from tests.gateway.harness import Gateway, running
from tests.support.pictures import RED, encoded, shape
from tests.support.pool import short_home
from tests.support.scale import patient

RUN_TIMEOUT_S = patient(120)
PICTURE = "picture.png"


@dataclass(frozen=True, slots=True)
class Workshop:
    """`secret` is what `proof.txt` in `folder` says: a client that prints it has been all the way."""

    gateway: Gateway
    folder: Path
    home: Path
    secret: str

    @property
    def url(self) -> str:
        return self.gateway.url

    async def run(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
        """Run a client, which inherits nothing, and return its output. Fails when it fails or takes too long."""
        clean = {"PATH": node_path(), "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb", "CI": "1"}
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            cwd=self.folder,
            env=clean | dict(env or {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            said, _ = await process.communicate()
            raise AssertionError(f"it did not end:\n{said.decode(errors='replace')}") from None
        text = said.decode(errors="replace")
        assert process.returncode == 0, text
        self._check_answers()
        return text

    def _check_answers(self) -> None:
        """A client that carries on after a refusal hides what we do wrong."""
        metrics = self.gateway.metrics
        models = (metrics.model(name) for name in self.gateway.app.services.config.models)
        answered = sum((model.requests for model in models), metrics.requests_without_model)
        assert set(answered) == {"200"}, answered
        assert metrics.unhandled_errors == 0


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncGenerator[Workshop, None]:
    async with _open(tmp_path, "agentic") as made:
        yield made


@pytest.fixture
async def gallery(tmp_path: Path) -> AsyncGenerator[Workshop, None]:
    """A workshop whose model sees, with a picture in its folder."""
    async with _open(tmp_path, "watchful") as made:
        (made.folder / PICTURE).write_bytes(encoded(shape("circle", RED)))
        yield made


@asynccontextmanager
async def _open(tmp_path: Path, worker: str) -> AsyncGenerator[Workshop, None]:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    secret = f"secret-{secrets.token_hex(8)}"
    (folder / "proof.txt").write_text(f"{secret}\n")
    # Clients that look at a model's abilities find those of the demo model's files.
    path = "demo" if worker == "agentic" else "m"
    models = [ModelConfig(name="m", path=path, aliases=("claude-*", "gpt-*"))]
    with short_home() as run:
        async with running(run, models=models, worker=worker) as gateway:
            yield Workshop(gateway, folder, home, secret)
