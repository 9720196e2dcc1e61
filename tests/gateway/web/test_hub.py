"""Search and downloads by the page, against a hub on a socket of this machine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import Gateway, running, until
from tests.gateway.web.visitors import log_in
from tests.support.hub import Hub, model_repo
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


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
    async with running(tmp_path / "h") as running_gateway:
        yield running_gateway


async def ended(gateway: Gateway, session: dict[str, str], pull_id: str) -> Any:
    async with asyncio.timeout(patient(60)):
        while True:
            pulls = (await gateway.client.get("/ui/api/pulls", headers=session)).json()["pulls"]
            (pull,) = (pull for pull in pulls if pull["id"] == pull_id)
            if pull["state"] not in ("waiting", "running"):
                return pull
            await asyncio.sleep(0.02)


async def order(gateway: Gateway, session: dict[str, str], repository: str) -> Any:
    answer = await gateway.client.post("/ui/api/pulls", json={"repository": repository}, headers=session)
    assert answer.status_code == 202, answer.text
    return answer.json()


async def test_a_model_is_looked_up_and_downloaded_and_then_listed(gateway: Gateway, tmp_path: Path) -> None:
    session = await log_in(gateway)
    told = (await gateway.client.get("/ui/api/hub/info?repository=org/tiny", headers=session)).json()
    assert (told["repository"], told["fits"], told["is_here"], told["model_type"]) == ("org/tiny", True, False, "qwen3")

    first, again = await order(gateway, session, "org/tiny"), await order(gateway, session, "org/tiny")
    assert again["id"] == first["id"]
    done = await ended(gateway, session, first["id"])

    assert done["state"] == "done", done
    assert done["downloaded_bytes"] == done["total_bytes"] > 0
    assert (Path(done["path"]) / "model.safetensors").exists()
    listed = (await gateway.client.get("/ui/api/models", headers=session)).json()["models"]
    assert {"name": "org/tiny", "state": "not configured"}.items() <= listed[-1].items()


async def test_a_cancelled_download_keeps_its_part_and_goes_on_with_the_next_order(
    gateway: Gateway, hub: Hub, tmp_path: Path
) -> None:
    session = await log_in(gateway)
    weights = hub.repos["org/tiny"].files["model.safetensors"]
    hub.stalls["model.safetensors"] = len(weights) // 2
    pull = await order(gateway, session, "org/tiny")
    waiting = await order(gateway, session, "org/other")
    cache = tmp_path / "cache"
    await until(lambda: any(part.stat().st_size for part in cache.rglob("*.incomplete")))

    unbegun = await gateway.client.delete(f"/ui/api/pulls/{waiting['id']}", headers=session)
    assert unbegun.json()["state"] == "cancelled"
    await gateway.client.delete(f"/ui/api/pulls/{pull['id']}", headers=session)
    stopped = await ended(gateway, session, pull["id"])
    kept = sum(part.stat().st_size for part in cache.rglob("*.incomplete"))
    hub.stalls.clear()
    done = await ended(gateway, session, (await order(gateway, session, "org/tiny"))["id"])

    assert (stopped["state"], "kept" in stopped["message"]) == ("cancelled", True)
    assert kept > 0
    assert done["state"] == "done", done
    assert any(request.range for request in hub.asked_for("model.safetensors"))


async def test_a_failed_download_says_why_in_a_sentence(gateway: Gateway) -> None:
    session = await log_in(gateway)
    failed = await ended(gateway, session, (await order(gateway, session, "org/nothing"))["id"])

    assert failed["state"] == "failed"
    assert "has no repository org/nothing" in failed["message"]


async def test_what_names_no_repository_is_refused(gateway: Gateway) -> None:
    session = await log_in(gateway)
    names = ["", "tiny", "--yes", "../../etc", "org/tiny;ls", "-o/x", "org/../x", "http://x/y", "a/b/c"]
    for name in (*names, "a/b@../c", "a/b@.", "a/b\n"):
        ordered = await gateway.client.post("/ui/api/pulls", json={"repository": name}, headers=session)
        asked = await gateway.client.get("/ui/api/hub/info", params={"repository": name}, headers=session)
        assert (ordered.status_code, asked.status_code) == (400, 400), name
    assert (await gateway.client.get("/ui/api/pulls", headers=session)).json() == {"pulls": []}


async def test_without_a_hub_the_own_list_is_searched(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await log_in(gateway)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    found = (await gateway.client.get("/ui/api/hub/search?words=qwen", headers=session)).json()

    assert found["is_offline"] is True
    assert found["models"]
    assert (await gateway.client.get("/ui/api/hub/search?words=+", headers=session)).status_code == 400


@pytest.mark.soak
async def test_a_download_ends_with_the_daemon(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hub.environ(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    hub.stalls["model.safetensors"] = 1000
    async with running(tmp_path / "h") as gateway:
        session = await log_in(gateway)
        await order(gateway, session, "org/tiny")
        await until(lambda: any((tmp_path / "cache").rglob("*.incomplete")))
        downloads = gateway.app.backend.downloads

    assert [pull.state for pull in downloads.views()] == ["cancelled"]
