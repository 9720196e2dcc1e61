"""Orders for adapters whose model, or who themselves, are taken out before a worker has loaded them."""

import asyncio
from pathlib import Path

import httpx2
import pytest

from tests.gateway.harness import until
from tests.gateway.test_reload import BEFORE, Reloadable, reloadable

pytestmark = pytest.mark.anyio


async def ordered(r: Reloadable) -> asyncio.Task[httpx2.Response]:
    """An order to load the adapter `x` of the model `b`, which its worker has got and not obeyed."""
    (r.path.parent / "adapters" / "x").mkdir(parents=True)
    body = {"lora_name": "x", "lora_path": "x", "model": "b"}
    task = asyncio.create_task(r.admin.post("/v1/load_lora_adapter", json=body))
    await until(lambda: ("b", "x") in r.reloader.adapter_loads)
    return task


async def test_a_load_whose_model_is_removed_is_told_so(tmp_path: Path) -> None:
    # The worker has loaded the adapter only when it is told to drain, and a long stream keeps it.
    async with reloadable(tmp_path, BEFORE, "--adapters-at-drain", "--step-ms", "50") as r:
        stream = asyncio.create_task(r.answer("b", stream=True, max_tokens=2000))
        await until(lambda: r.gateway.link.in_flight == 1)
        load = await ordered(r)
        assert (await r.reload("[models.a]\n")).removed == ["b"]
        refused = await load

        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"] == (
            "The adapter 'x' was not loaded: the model 'b' was taken out meanwhile."
        )
        assert not stream.done()
        stream.cancel()
        assert (await r.admin.get("/v1/adapters")).json() == {"adapters": []}


async def test_a_load_that_is_taken_back_before_its_end_is_told_so(tmp_path: Path) -> None:
    async with reloadable(tmp_path, BEFORE, "--adapters-at-drain") as r:
        load = await ordered(r)
        assert (await r.admin.post("/v1/unload_lora_adapter", json={"lora_name": "x"})).status_code == 200
        refused = await load

        assert refused.status_code == 400, refused.text
        assert "the adapter 'x' was taken out meanwhile" in refused.json()["error"]["message"]


async def test_a_load_that_waits_for_a_model_which_is_removed_is_told_so(tmp_path: Path) -> None:
    async with reloadable(tmp_path, BEFORE, "--load-s", "600") as r:
        (tmp_path / "adapters" / "x").mkdir(parents=True)
        body = {"lora_name": "x", "lora_path": "x", "model": "b"}
        load = asyncio.create_task(r.admin.post("/v1/load_lora_adapter", json=body))
        await until(lambda: r.gateway.pool.worker("b").view().since_s > 0 and r.gateway.pool.worker("b").is_resident)
        await r.reload("[models.a]\n")

        refused = await load
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "model 'b' was removed from the configuration"
