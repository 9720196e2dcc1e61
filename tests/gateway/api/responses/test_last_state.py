"""States of background responses that clients see: a daemon that is killed afterwards must not leave others."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from gateway.api.responses.background import Background
from gateway.api.responses.encoder import ResponseRun, echo
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.journal import ResponseJournal, ResponseJournals
from gateway.api.responses.request import decode_responses, toolbox
from gateway.api.responses.response import Response
from gateway.api.responses.store import done
from gateway.config.settings import ModelConfig
from gateway.disk_and_clock import Disk
from gateway.errors import Unavailable
from protocol.from_worker import Delta, Finish, Usage
from tests.gateway.harness import running
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class SlowStore:
    """Store whose states reach the disk when `finish` is called."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._written = asyncio.Event()

    def keep(self, state: Response) -> Future[bool]:
        self.kept.append(state.status)
        return done(True)

    async def stored(self) -> None:
        await self._written.wait()

    def finish(self) -> None:
        self._written.set()


def background_of(home: Path, store: SlowStore) -> Background:
    request, _ = decode_responses(b'{"model": "m", "input": "hi"}')
    response = echo(request, toolbox(request), ModelConfig(name="m", path="m"), "resp_0", 7, True)
    run = ResponseRun(response, ResponseOutput("0", {}, False), lambda: 0, store.keep, lambda _: None)
    background = Background("k", run, store.stored)
    journals = ResponseJournals(home, lambda: 0, Counter())
    background.journal = ResponseJournal(journals, home / "resp_0.journal", background.events.add)
    background.journal.is_sound = False
    return background


async def test_a_failure_is_shown_once_it_is_stored(tmp_path: Path) -> None:
    store = SlowStore()
    background = background_of(tmp_path, store)
    failing = asyncio.create_task(background.fail(Unavailable("The model cannot be loaded.")))
    asked = asyncio.create_task(background.state())
    await asyncio.sleep(0.05)

    assert store.kept == ["failed"]
    assert not background.is_over
    assert not asked.done()
    store.finish()
    await failing
    assert (await asked).status == "failed"


async def test_a_cancelled_response_is_stored_before_its_sequence_has_ended(tmp_path: Path) -> None:
    store = SlowStore()
    background = background_of(tmp_path, store)
    background.cancel()
    asked = asyncio.create_task(background.state())
    await asyncio.sleep(0.05)

    assert store.kept == ["cancelled"]
    assert not asked.done()
    store.finish()
    assert (await asked).status == "cancelled"


async def test_a_response_that_ends_after_it_was_cancelled_stays_cancelled(tmp_path: Path) -> None:
    store = SlowStore()
    store.finish()
    background = background_of(tmp_path, store)
    background.cancel()
    background.encoder.encode([Delta(1, text="so", token_ids=(1,), finish=Finish.STOP, usage=Usage(1, 0, 1))])
    await background.complete()

    state = await background.state()
    assert state.status == "cancelled"
    assert state.usage is not None
    assert state.usage.output_tokens == 1


async def test_an_id_is_sent_once_the_next_daemon_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_create = threading.Event()
    open_now = Disk.open

    def open_late(disk: Disk, path: Path, flags: int) -> int:
        if path.suffix == ".journal":
            may_create.wait(patient(20))
        return open_now(disk, path, flags)

    monkeypatch.setattr(Disk, "open", open_late)
    body = {"model": "m", "input": "hi", "background": True}
    async with running(tmp_path) as gateway:
        asked = asyncio.create_task(gateway.client.post(PATH, json=body))
        done, _ = await asyncio.wait([asked], timeout=0.3)
        is_early = bool(done)
        may_create.set()
        answer = await asked
    assert answer.status_code == 200
    assert not is_early
