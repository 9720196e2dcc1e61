"""Adapters over HTTP from a real worker: their names, who may use them, and loads and unloads while requests run."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import has_keys
from gateway.app import create_admin_app
from gateway.config.load import load_config
from gateway.reload import Reloader
from gateway.telemetry.prometheus import Exposition
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import DEADLINE_S, Gateway, chat, never_drained, running, until
from tests.support.adapters import mlx_adapter, peft_adapter
from tests.support.models import build
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


@dataclass(slots=True)
class Served:
    """A gateway with adapters, its control socket's API, and the folder that adapters may be loaded from."""

    gateway: Gateway
    admin: httpx2.AsyncClient
    reloader: Reloader
    folder: Path
    model: Path

    async def said(self, model: str, name: str = "short", **fields: Any) -> str:
        """The answer to a request of this name."""
        headers = {"x-request-id": name}
        reply = await self.gateway.client.post("/v1/chat/completions", json=asked(model) | fields, headers=headers)
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert isinstance(body["choices"][0]["message"]["content"], str)
        return body["choices"][0]["message"]["content"]

    async def order(self, verb: str, **body: Any) -> httpx2.Response:
        return await self.admin.post(f"/v1/{verb}_lora_adapter", json=body)


def asked(model: str) -> dict[str, Any]:
    return chat("Tell me.", model=model, temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served, None]:
    root = tmp_path_factory.mktemp("adapters")
    model = build("qwen3", root / "model")
    mlx_adapter(root / "sql", model, seed=1)
    peft_adapter(root / "docs", mlx_adapter(root / "alike", model, seed=2), alpha=12.0)
    with short_home() as home:
        for seed in (3, 4):
            mlx_adapter(home / "adapters" / f"seed{seed}", model, seed=seed, rank=seed)
        adapters = {"sql": str(root / "sql"), "docs": str(root / "docs"), "gone": str(root / "gone")}
        lines = [f'{name} = "{path}"' for name, path in adapters.items()]
        (home / "mlxd.toml").write_text(
            f'[models.m]\npath = "{model}"\naliases = ["first"]\n[models.m.adapters]\n' + "\n".join(lines)
        )
        config = load_config(home, has_keys=has_keys)
        async with running(home, models=list(config.models.values()), command=default_command) as gateway:
            reloader = Reloader(gateway.app, lambda: load_config(home, has_keys=has_keys))
            app = create_admin_app(gateway.app, reloader, gateway.url, never_drained)
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://x", timeout=patient(DEADLINE_S)
            ) as admin:
                yield Served(gateway, admin, reloader, home / "adapters", model)


async def test_each_name_of_an_adapter_is_answered_by_it_and_is_on_a_card_of_its_own(served: Served) -> None:
    base, sql, docs = await served.said("m"), await served.said("sql"), await served.said("m:docs")
    assert len({base, sql, docs}) == 3
    assert await served.said("m:sql") == await served.said("first:sql") == sql
    together = await asyncio.gather(*(served.said(name) for name in ("docs", "m", "sql", "first")))
    assert together == [docs, base, sql, base]
    reply = await served.gateway.client.get("/v1/models")
    cards = {card["id"]: card for card in reply.json()["data"]}
    assert cards.keys() >= {"m", "m:sql", "m:docs"}
    card = cards["m:sql"]
    assert card["parent"] == "m"
    assert card["root"].endswith("/sql")
    assert set(card["aliases"]) == {"sql", "first:sql"}
    answer = (await served.gateway.client.post("/v1/chat/completions", json=asked("sql"))).json()
    assert answer["model"] == "m:sql"


async def test_an_adapter_that_cannot_be_served_is_refused_with_its_reason_and_others_are_served(
    served: Served,
) -> None:
    reply = await served.gateway.client.post("/v1/chat/completions", json=asked("gone"))
    assert reply.status_code == 503
    assert "there is no folder" in reply.json()["error"]["message"]
    told = {each["name"]: each for each in (await served.admin.get("/v1/adapters")).json()["adapters"]}
    assert told["gone"]["state"] == "failed"
    assert (told["sql"]["state"], told["sql"]["kind"], told["sql"]["rank"]) == ("loaded", "lora", 4)


async def test_requests_are_counted_by_adapter(served: Served) -> None:
    await served.said("sql", n=2)
    lines = Exposition(served.gateway.metrics).text().decode().splitlines()
    counts = [line for line in lines if line.startswith('mlxd_adapter_requests_total{adapter="sql",model="m"}')]
    assert len(counts) == 1
    assert float(counts[0].rpartition(" ")[2]) >= 2


async def test_an_adapter_comes_and_goes_while_its_model_serves(served: Served) -> None:
    epoch, base = served.gateway.pool.worker("m").epoch, await served.said("m")
    stream = asyncio.create_task(served.said("m", max_tokens=400))
    loaded = await served.order("load", lora_name="new", lora_path="seed3")
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["rank"], loaded.json()["state"], loaded.json()["is_configured"]) == (3, "loaded", False)
    first = await served.said("new")
    assert first != base
    assert await served.said("m:new") == first
    # A reload of the file keeps it.
    assert (await served.reloader.reload()).removed == []
    assert await served.said("new") == first
    again = await served.order("load", lora_name="new", lora_path="seed4")
    assert again.status_code == 400
    assert "already" in again.json()["error"]["message"]
    running = asyncio.create_task(served.said("new", "long", max_tokens=400))
    requests = served.gateway.app.services.requests
    await until(lambda: running.done() or any(view.id == "long" and view.generated_tokens for view in requests.views()))
    gone = await served.order("unload", lora_name="new")
    assert gone.status_code == 200
    assert (await served.gateway.client.post("/v1/chat/completions", json=asked("new"))).status_code == 404
    assert (await running).startswith(first)
    # Under the same name another one may come.
    assert (await served.order("load", lora_name="new", lora_path="seed4", model="m")).status_code == 200
    assert await served.said("new") not in (first, base)
    assert (await served.order("unload", lora_name="m:new")).status_code == 200
    assert (await stream).startswith(base)
    assert await served.said("m") == base
    assert served.gateway.pool.worker("m").epoch == epoch, "nothing was restarted"


async def test_what_may_not_be_loaded_is_refused_and_leaves_nothing(served: Served, tmp_path: Path) -> None:
    outside = mlx_adapter(tmp_path / "outside", served.model, seed=5)
    (served.folder / "link").symlink_to(outside)
    (served.folder / "empty").mkdir()
    for path, reason in (
        (str(outside), "neither below"),
        ("link", "neither below"),
        ("../..", "neither below"),
        ("absent", "there is no folder"),
        ("empty", "holds no adapter_config.json"),
        ("x\0y", "there is no folder"),
    ):
        reply = await served.order("load", lora_name="bad", lora_path=path)
        assert reply.status_code == 400, path
        assert reason in reply.json()["error"]["message"], path
        assert (await served.gateway.client.post("/v1/chat/completions", json=asked("bad"))).status_code == 404
    for name, reason in (("sql", "already"), ("m", "already"), ("a:b", "':'"), ("-x", "begin")):
        reply = await served.order("load", lora_name=name, lora_path="seed3")
        assert reply.status_code == 400, name
        assert reason in reply.json()["error"]["message"], name
    assert (await served.order("load", lora_name="x", lora_path="seed3", load_inplace=True)).status_code == 400
    assert (await served.order("load", lora_name="x", lora_path="seed3", model="none")).status_code == 404
    assert (await served.order("unload", lora_name="sql")).status_code == 400
    assert (await served.order("unload", lora_name="never")).status_code == 404
    for route in ("load_lora_adapter", "unload_lora_adapter"):
        public = await served.gateway.client.post(f"/v1/{route}", json={"lora_name": "x", "lora_path": "seed3"})
        assert public.status_code == 404, "these are on the control socket only"


async def test_a_worker_that_is_started_again_has_the_adapters_that_were_loaded(served: Served) -> None:
    assert (await served.order("load", lora_name="kept", lora_path="seed3")).status_code == 200
    first = await served.said("kept")
    await served.gateway.pool.restart("m")
    assert await served.said("kept") == first
    assert (await served.order("unload", lora_name="kept")).status_code == 200
