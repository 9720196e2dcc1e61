"""Responses of keys that were revoked: what ends, what is deleted, and what is not stored any more."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import Key, KeyFile
from tests.gateway.api.responses.test_background import PATH, asking, events
from tests.gateway.harness import running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_key_made_again_under_a_revoked_keys_name_has_nothing_of_it(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")

    def made() -> dict[str, str]:
        return {"authorization": f"Bearer {keys.create(Key(name='k', prefix='', salt='', hash=''))[1]}"}

    first = made()
    secret = {"type": "message", "role": "user", "id": "msg_mine", "content": "secret words"}
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:

        async def post(headers: dict[str, str], **fields: Any) -> httpx2.Response:
            return await gateway.client.post(PATH, json=asking(2, **fields), headers=headers)

        stored = (await post(first, input=[secret], background=False)).json()["id"]
        runs = (await gateway.client.post(PATH, json=asking(5000), headers=first)).json()["id"]
        kept = (await post(first, background=False)).json()["id"]
        rotated = {"authorization": f"Bearer {keys.rotate('k')[1]}"}
        assert (await gateway.client.get(f"{PATH}/{kept}", headers=rotated)).status_code == 200
        keys.revoke("k")
        again = made()
        for each in (stored, runs, f"{stored}/input_items"):
            assert (await gateway.client.get(f"{PATH}/{each}", headers=again)).status_code == 404
        for fields in ({"previous_response_id": stored}, {"input": [{"type": "item_reference", "id": "msg_mine"}]}):
            assert (await post(again, background=False, **fields)).status_code in (400, 404)
        # The running one has ended, and nothing is left on the disk.
        await until(lambda: gateway.app.services.admission.inside("m") == 0)
        await until(lambda: b"secret words" not in b"".join(_contents(tmp_path)))
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        assert (await gateway.client.get(f"{PATH}/{runs}", headers=again)).status_code == 404


async def test_a_stream_that_ends_after_its_key_was_revoked_is_not_stored(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    revoked, other = (
        {"authorization": f"Bearer {keys.create(Key(name=name, prefix='', salt='', hash=''))[1]}"} for name in "ab"
    )
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        asked = asking(20, background=False, stream=True, input=f"hold {tmp_path / 'may_end'}")
        streaming = asyncio.create_task(gateway.client.post(PATH, json=asked, headers=revoked))
        await until(lambda: gateway.metrics.model("m").generation_tokens > 10)
        keys.revoke("a")
        assert (await gateway.client.get("/v1/models", headers=revoked)).status_code == 401
        (tmp_path / "may_end").touch()
        last = events((await streaming).text)[-1]
        assert last["type"] == "response.incomplete"
        # The store has done what came before.
        kept = (await gateway.client.post(PATH, json=asking(2, background=False), headers=other)).json()["id"]
        assert (await gateway.client.get(f"{PATH}/{kept}", headers=other)).status_code == 200
        assert (last["response"]["id"] in _ids(tmp_path), kept in _ids(tmp_path)) == (False, True)


async def test_a_missing_key_file_revokes_all_keys(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    headers = {"authorization": f"Bearer {keys.create(Key(name='a', prefix='', salt='', hash=''))[1]}"}
    content = keys.path.read_bytes()
    async with running(tmp_path) as gateway:
        asked = asking(2, background=False, input="secret words")
        made = (await gateway.client.post(PATH, json=asked, headers=headers)).json()["id"]
        assert (await gateway.client.get(f"{PATH}/{made}", headers=headers)).status_code == 200
    keys.path.unlink()
    async with running(tmp_path) as gateway:
        assert (await gateway.client.get(f"{PATH}/{made}")).status_code == 404
    assert _ids(tmp_path) == []
    assert b"secret words" not in b"".join(_contents(tmp_path))
    keys.path.write_bytes(content)
    keys.path.chmod(0o600)
    async with running(tmp_path) as gateway:
        assert (await gateway.client.get(f"{PATH}/{made}", headers=headers)).status_code == 404


def _ids(home: Path) -> list[str]:
    """Ids of all stored responses."""
    (path,) = home.rglob("responses.sqlite")
    with closing(sqlite3.connect(path)) as database:
        return [row[0] for row in database.execute("SELECT id FROM responses")]


def _contents(home: Path) -> Iterator[bytes]:
    for path in home.rglob("*"):
        if path.is_file():
            with suppress(FileNotFoundError):
                yield path.read_bytes()
