"""A changed configuration file, put into force under a running gateway."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.access.key import has_keys
from gateway.app import create_admin_app
from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError, ModelConfig, SamplingDefaults, ServerConfig, TlsConfig, url_of
from gateway.control_types import ReloadResult
from gateway.reload import FIXED, Reloader, changes, describe, with_fixed
from gateway.telemetry.logs import OURS
from gateway.telemetry.prometheus import Exposition
from gateway.workers.supervisor.state import State
from tests.gateway.harness import Gateway, chat, events, never_drained, running, until
from tests.support.scale import scaled

pytestmark = pytest.mark.anyio
NOTHING = ReloadResult([], [], [], [], [])
STREAM = {"stream": True, "max_tokens": 200}


@dataclass(slots=True)
class Reloadable:
    """A gateway and its file."""

    gateway: Gateway
    path: Path
    reloader: Reloader
    admin: httpx2.AsyncClient

    def write(self, text: str) -> None:
        self.path.write_text(text)

    async def reload(self, text: str) -> ReloadResult:
        self.write(text)
        return await self.reloader.reload()

    def epoch(self, model: str) -> int:
        return self.gateway.pool.worker(model).epoch

    async def answer(self, model: str = "a", **fields: object) -> httpx2.Response:
        return await self.gateway.client.post("/v1/chat/completions", json=chat(model=model) | fields)


BEFORE = """
[server]
drain = "20s"
[models.a]
aliases = ["first"]
[models.b]
"""


@asynccontextmanager
async def reloadable(home: Path, text: str = BEFORE, *options: str) -> AsyncGenerator[Reloadable, None]:
    path = home / "mlxd.toml"
    path.write_text(text)
    config = load_config(home, has_keys=has_keys)
    async with running(home, options, list(config.models.values()), config.server) as gateway:
        reloader = Reloader(gateway.app, lambda: load_config(home, has_keys=has_keys))
        admin = create_admin_app(gateway.app, reloader, url_of(config.server), never_drained)
        transport = httpx2.ASGITransport(admin)
        async with httpx2.AsyncClient(transport=transport, base_url="http://mlxd") as client:
            yield Reloadable(gateway, path, reloader, client)


def make(server: ServerConfig | None = None, **models: ModelConfig) -> Config:
    return Config(home=Path("/h"), server=server or ServerConfig(), models=models, config_path=Path("/h/mlxd.toml"))


# -- what differs ----------------------------------------------------------------------------------------------------


def test_changes_are_told_by_the_keys_of_the_file() -> None:
    a = ModelConfig(name="a", path="a")
    old = make(a=a, gone=ModelConfig(name="gone", path="gone"))
    new = make(
        ServerConfig(drain_s=5.0, max_body_bytes=2048),
        a=ModelConfig(name="a", path="x", sampling=SamplingDefaults(top_k=1)),
        fresh=ModelConfig(name="fresh", path="fresh"),
    )

    assert [*changes(old, new)] == ["server.drain", "server.max_body", "models.a.path", "models.a.sampling"]
    assert [*changes(old, old)] == []


def test_what_is_settled_at_the_start_stays() -> None:
    wanted = ServerConfig(
        host="::",
        port=9,
        ollama_port=8,
        tls=TlsConfig("c.pem", "k.pem"),
        otlp_endpoint="http://127.0.0.1:9",
    )
    assert all(getattr(wanted, name) != getattr(ServerConfig(), name) for name in FIXED)

    assert with_fixed(make(wanted), make(ServerConfig())).server == ServerConfig()


# -- names and numbers apply at once, without touching a worker ------------------------------------------------------


async def test_an_unchanged_file_changes_nothing(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        await r.answer()
        assert await r.reload(BEFORE) == NOTHING
        assert r.epoch("a") == 1


async def test_aliases_profiles_sampling_and_limits_apply_without_touching_the_worker(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        assert (await r.answer("first")).status_code == 200
        done = await r.reload(
            """
[server]
max_body = "2KiB"
default = "a:short"
[models.a]
aliases = ["second"]
ttl = "1h"
sampling = { max_tokens = 3 }
[models.a.profiles.short]
sampling = { max_tokens = 2 }
[models.b]
"""
        )

        assert done == ReloadResult(
            [],
            [],
            [],
            [
                "server.drain",
                "server.max_body",
                "server.default",
                "models.a.aliases",
                "models.a.sampling",
                "models.a.profiles",
                "models.a.ttl",
            ],
            [],
        )
        assert (await r.answer("first")).status_code == 404
        for model, tokens in (("second", 3), ("a:short", 2), ("", 2)):
            answer = (await r.answer(model, max_tokens=None)).json()
            assert answer["usage"]["completion_tokens"] == tokens
        assert (await r.answer(messages=[{"role": "user", "content": "x" * 3000}])).status_code == 413
        assert r.epoch("a") == 1


async def test_cors_and_the_log_level_apply_at_once(tmp_path: Path) -> None:
    origin = {"origin": "https://a.example"}
    async with reloadable(tmp_path) as r:
        assert "vary" not in (await r.gateway.client.get("/livez", headers=origin)).headers
        level = logging.getLogger("gateway").level
        try:
            await r.reload('[server]\ncors = ["https://a.example"]\nlog_level = "error"\n[models.a]\n')
            assert logging.getLogger("gateway").level == logging.ERROR
        finally:
            for name in OURS:
                logging.getLogger(name).setLevel(level)
        said = await r.gateway.client.get("/livez", headers=origin)
        assert said.headers["access-control-allow-origin"] == "https://a.example"
        await r.reload(BEFORE)
        assert "vary" not in (await r.gateway.client.get("/livez", headers=origin)).headers


async def test_what_needs_a_restart_is_said_each_time_and_not_done(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        for _ in range(2):
            done = await r.reload("[server]\nport = 9999\nollama_port = 9998\n" + BEFORE.partition('"20s"\n')[2])
            assert done.needs_restart == ["server.port", "server.ollama_port"]
        status = (await r.admin.get("/v1/status")).json()
        assert status["url"].endswith(":8484")
        assert (describe(done), describe(NOTHING)) == ("nothing is applied now", "nothing has changed")


# -- a bad file ------------------------------------------------------------------------------------------------------


async def test_a_bad_file_changes_nothing_and_names_its_line(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        before = r.gateway.app.services.config
        r.write('[server]\ndrain = "1s"\n[models.new]\n[models.a]\nmax_runing = 3\n')
        refused = await r.admin.post("/v1/config/reload", json={})

        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "bad_config"
        assert refused.json()["error"]["message"].startswith(f"{r.path}:5: unknown key 'max_runing'")
        assert r.gateway.app.services.config is before
        assert (await r.answer("new")).status_code == 404
        with pytest.raises(ConfigError):
            await r.reload("[models")
        r.write(BEFORE + "[models.new]\n")
        assert (await r.admin.post("/v1/config/reload", json={})).json()["added"] == ["new"]


async def test_nothing_is_reloaded_while_the_daemon_drains(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        r.gateway.app.drain()
        r.write("[models.new]\npreload = true\n")
        refused = await r.admin.post("/v1/config/reload", json={})

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert [view.name for view in r.gateway.pool.workers()] == ["a", "b"]


# -- models come and go ----------------------------------------------------------------------------------------------


async def test_an_added_model_can_be_used_and_is_preloaded_if_it_wants(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        done = await r.reload(BEFORE + "[models.c]\n[models.d]\npreload = true\n")

        assert done.added == ["c", "d"]
        assert (await r.answer("c")).status_code == 200
        await until(lambda: r.gateway.pool.worker("d").state is State.READY)
        listed = (await r.gateway.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b", "c", "d"]
        assert 'model="d"' in (await r.gateway.client.get("/metrics")).text


async def test_a_removed_model_finishes_its_streams_and_is_gone_for_new_requests(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        stream = asyncio.create_task(r.answer("b", **STREAM))
        await until(lambda: r.gateway.link.in_flight == 1)
        done = await r.reload("[models.a]\n")

        assert done.removed == ["b"]
        assert (await r.answer("b")).status_code == 404
        assert [view.name for view in r.gateway.pool.workers()] == ["a"]
        assert not stream.done()
        text, ends = words(await stream)
        assert (len(text.split()), ends) == (200, ["length"])
        await until(lambda: not (tmp_path / "run" / "workers" / "b.json").exists())
        await until(lambda: b'model="b"' not in Exposition(r.gateway.metrics).text())
        assert (await r.answer("a")).status_code == 200


async def test_whoever_waits_for_a_removed_model_is_told_so(tmp_path: Path) -> None:
    async with reloadable(tmp_path, BEFORE, "--load-s", "30") as r:
        waiting = asyncio.create_task(r.answer("b"))
        await until(lambda: r.gateway.pool.worker("b").state is State.LOADING)
        await r.reload("[models.a]\n")
        answer = await waiting

        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "model 'b' was removed from the configuration"


async def test_a_model_that_comes_back_while_it_leaves_is_the_same_one(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        stream = asyncio.create_task(r.answer("b", **STREAM))
        await until(lambda: r.gateway.link.in_flight == 1)
        await r.reload("[models.a]\n")
        await until(lambda: r.gateway.pool.worker("b").state is State.DRAINING)
        assert (await r.reload(BEFORE)).added == ["b"]
        again = asyncio.create_task(r.answer("b"))

        assert (await stream).text.rstrip().endswith("[DONE]")
        assert (await again).status_code == 200
        assert r.epoch("b") == 2


async def test_a_model_that_goes_and_comes_and_goes_at_once_is_gone(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        await r.answer("b")
        app, both = r.gateway.app, r.gateway.app.services.config
        one = msgspec.structs.replace(both, models={"a": both.models["a"]})
        for config in (one, both, one):
            app.apply(config)
        await until(lambda: not (tmp_path / "run" / "workers" / "b.json").exists())
        for config in (both, one, both, one, both):
            app.apply(config)
        assert (await r.answer("b")).status_code == 200
        assert (await r.answer("a")).status_code == 200


# -- what a worker was started with ----------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(
    "line",
    [
        'path = "elsewhere"',
        *scaled(["max_running = 3", "context = 512", 'parser = "qwen3"', "cache = { ram = 0 }", 'kv = "1GiB"'], []),
    ],
)
async def test_what_a_worker_was_started_with_restarts_it_and_its_streams_go_on(tmp_path: Path, line: str) -> None:
    async with reloadable(tmp_path) as r:
        may_end = tmp_path / "may_end"
        short = held_by(may_end) | {"max_tokens": 60}
        may_end.touch()
        undisturbed = await r.answer("b", **short)
        may_end.unlink()
        stream = asyncio.create_task(r.answer("b", **short))
        await until(lambda: r.gateway.link.in_flight == 1)
        done = await r.reload(BEFORE + line + "\n")
        may_end.touch()

        assert done.restarted == ["b"]
        assert done.changed == [f"models.b.{line.split()[0]}"]
        assert words(await stream) == words(undisturbed)
        assert r.epoch("b") == 2


async def test_a_model_that_is_not_loaded_just_gets_its_new_settings(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as r:
        done = await r.reload(BEFORE + "context = 512\n")

        assert (done.restarted, done.changed) == ([], ["models.b.context"])
        assert r.gateway.pool.worker("b").state is State.STOPPED
        assert (await r.answer("b")).status_code == 200
        await until(lambda: r.gateway.pool.worker("b").spec.context == 512)


async def test_the_log_level_and_another_models_disk_cache_restart_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reloadable(tmp_path) as r:
        await r.answer("a")
        text = BEFORE.replace('"20s"', '"20s"\nlog_level = "debug"') + 'cache = { disk = "77GiB" }\n'
        level = logging.getLogger("gateway").level
        try:
            done = await r.reload(text)
            await until(lambda: "a#1: logs from debug on" in caplog.text)
        finally:
            for name in OURS:
                logging.getLogger(name).setLevel(level)

        assert done.restarted == []
        assert (await r.answer("a")).status_code == 200
        assert r.epoch("a") == 1


async def test_a_model_that_failed_is_tried_again_with_its_new_settings(tmp_path: Path) -> None:
    async with reloadable(tmp_path, BEFORE, "--exit-on-load", "65") as r:
        assert (await r.answer("b")).status_code == 503
        await until(lambda: r.gateway.pool.worker("b").state is State.FAILED)
        await r.reload(BEFORE + "context = 512\n")

        await until(lambda: r.gateway.pool.worker("b").state is State.STOPPED)


@pytest.mark.soak
async def test_reloads_amid_requests_lose_none(tmp_path: Path) -> None:
    texts: list[Callable[[int], str]] = [
        lambda n: BEFORE + f"context = {512 + n}\n",
        lambda n: BEFORE + f"[models.extra{n}]\n",
        lambda n: BEFORE + f"sampling = {{ top_k = {n} }}\n",
    ]
    async with reloadable(tmp_path) as r:
        may_end = tmp_path / "may_end"
        short = held_by(may_end) | {"max_tokens": 80}
        may_end.touch()
        expected = words(await r.answer("b", **short))
        may_end.unlink()
        streams = [asyncio.create_task(r.answer(name, **short)) for name in ("a", "b") * scaled(8, 4)]
        await until(lambda: r.gateway.link.in_flight == len(streams))
        for n in range(6):
            await r.reload(texts[n % 3](n))
        may_end.touch()
        for stream in streams:
            assert words(await stream) == expected


def held_by(may_end: Path) -> dict[str, Any]:
    """Fields of a stream whose last token comes once there is this file."""
    return STREAM | {"messages": [{"role": "user", "content": f"hold {may_end}"}]}


def words(answer: httpx2.Response) -> tuple[str, list[str]]:
    """All that a stream said, however it was cut into events, and how it ended."""
    choices = [event["choices"][0] for event in events(answer.text) if "choices" in event]
    assert answer.text.rstrip().endswith("[DONE]")
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
