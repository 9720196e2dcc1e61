"""The routes of the page: orders for models, keys, configuration, logs and charts, with a session."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile, has_keys
from gateway.config.load import load_config
from gateway.reload import Reloader
from gateway.state_dir import audit_path
from gateway.telemetry.logs import LogSinks, RotatingFile
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.web.visitors import api_routes, log_in

pytestmark = pytest.mark.anyio

FILE = '[server]\ndrain = "20s"\n[models.a]\naliases = ["first"]\n[models.b]\n'


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("h")
    (home / "mlxd.toml").write_text(FILE)
    return home


@pytest.fixture(scope="module")
async def gateway(home: Path) -> AsyncGenerator[Gateway, None]:
    """One with a configuration file that it can read again."""
    config = load_config(home, has_keys=has_keys)
    async with running(home, ["--step-ms", "2"], list(config.models.values()), config.server) as running_gateway:
        running_gateway.app.backend.read_with(
            Reloader(running_gateway.app, lambda: load_config(home, has_keys=has_keys))
        )
        yield running_gateway


@pytest.fixture(scope="module")
async def session(gateway: Gateway) -> dict[str, str]:
    return await log_in(gateway)


async def get(gateway: Gateway, session: dict[str, str], path: str) -> Any:
    answer = await gateway.client.get(f"/ui/api/{path}", headers=session)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def post(gateway: Gateway, session: dict[str, str], path: str, status: int = 200, **body: Any) -> Any:
    answer = await gateway.client.post(f"/ui/api/{path}", json=body, headers=session)
    assert answer.status_code == status, answer.text
    return answer.json()


# -- models and requests ---------------------------------------------------------------------------------------------


async def test_orders_for_models_are_accepted_at_once_and_carried_out(
    gateway: Gateway, session: dict[str, str], home: Path
) -> None:
    def state() -> str:
        return str(gateway.pool.worker("a").state)

    assert await post(gateway, session, "models/load", 202, model="first") == {"model": "a", "order": "load"}
    await until(lambda: state() == "ready")
    epoch = gateway.pool.worker("a").epoch
    await post(gateway, session, "models/restart", 202, model="a")
    await until(lambda: state() == "ready" and gateway.pool.worker("a").epoch > epoch)
    await post(gateway, session, "models/pin", 202, model="a")
    await until(lambda: gateway.pool.broker.is_pinned("a"))
    await post(gateway, session, "models/unpin", 202, model="a")
    await post(gateway, session, "models/unload", 202, model="a")
    await until(lambda: state() == "stopped" and not gateway.pool.broker.is_pinned("a"))

    await until(lambda: '"model.unload"' in audit_path(home).read_text())
    line = next(line for line in audit_path(home).read_text().splitlines() if '"model.load"' in line)
    told = json.loads(line)
    assert told["client"].startswith("127.0.0.1:")
    assert (told["target"], bool(told["facts"]["session"])) == ("a", True)
    assert told["pid"] is None


async def test_an_order_for_a_model_that_is_none_is_a_404(gateway: Gateway, session: dict[str, str]) -> None:
    refused = await post(gateway, session, "models/load", 404, model="nope")
    assert refused["error"]["code"] == "model_not_found"
    await post(gateway, session, "models/load", 400, name="a")


async def test_a_request_is_listed_with_its_prefill_and_cancelled(gateway: Gateway, session: dict[str, str]) -> None:
    asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat(model="a", max_tokens=20_000)))
    await until(lambda: bool(gateway.app.services.requests.views()))
    (view,) = (await get(gateway, session, "requests"))["requests"]
    assert (view["model"], view["prefilled_tokens"] >= 0) == ("a", True)

    await post(gateway, session, "requests/cancel", id=view["id"])

    assert (await asking).status_code == 499


async def test_every_model_is_listed_with_whether_it_fits(gateway: Gateway, session: dict[str, str]) -> None:
    listed = await get(gateway, session, "models")

    assert listed["available_bytes"] > 0
    by_name = {model["name"]: model for model in listed["models"]}
    assert by_name["b"]["fits"] is None
    assert "download it" in by_name["b"]["verdict"]


# -- configuration ---------------------------------------------------------------------------------------------------


async def test_a_changed_file_is_shown_as_a_difference_before_and_after_its_reload(
    gateway: Gateway, session: dict[str, str], home: Path
) -> None:
    (home / "mlxd.toml").write_text(FILE)
    await post(gateway, session, "config/reload")
    shown = await get(gateway, session, "config")
    assert shown["file"] == str(home / "mlxd.toml")
    assert shown["values"]["server"]["drain"] == 20.0
    (home / "mlxd.toml").write_text(FILE.replace("20s", "25s") + "[models.c]\n")

    checked = await post(gateway, session, "config/check")
    assert (await get(gateway, session, "config"))["toml"] == shown["toml"]
    reloaded = await post(gateway, session, "config/reload")

    assert checked["ok"] is True
    assert checked["changes"] == reloaded["done"]
    assert (reloaded["done"]["added"], reloaded["done"]["changed"]) == (["c"], ["server.drain"])
    for diff in (checked["diff"], reloaded["diff"]):
        assert '-drain = "20s"\n+drain = "25s"' in diff
        assert "+[models.c]" in diff
    assert (await post(gateway, session, "config/check"))["diff"] == ""


async def test_a_check_foretells_which_models_a_reload_restarts(
    gateway: Gateway, session: dict[str, str], home: Path
) -> None:
    (home / "mlxd.toml").write_text(FILE)
    await post(gateway, session, "config/reload")
    await gateway.pool.load("b")
    (home / "mlxd.toml").write_text(FILE.replace("[models.b]", "[models.b]\nmax_running = 3"))

    checked = await post(gateway, session, "config/check")
    reloaded = await post(gateway, session, "config/reload")

    assert checked["changes"]["restarted"] == ["b"]
    assert reloaded["done"]["restarted"] == ["b"]


async def test_a_bad_file_is_told_with_its_line_and_changes_nothing(
    gateway: Gateway, session: dict[str, str], home: Path
) -> None:
    before = (await get(gateway, session, "config"))["toml"]
    (home / "mlxd.toml").write_text("[server]\nprot = 1\n")

    checked = await post(gateway, session, "config/check")
    refused = await post(gateway, session, "config/reload", 400)

    assert (checked["ok"], checked["line"]) == (False, 2)
    assert "did you mean 'port'" in checked["error"]
    assert refused["error"]["code"] == "bad_config"
    assert (await get(gateway, session, "config"))["toml"] == before


async def test_settings_of_a_client_are_those_of_mlxctl_connect_without_a_key(
    gateway: Gateway, session: dict[str, str]
) -> None:
    told = await get(gateway, session, "connect?client=codex&model=first&url=http://studio.local:8484/x")
    wrong = await gateway.client.get("/ui/api/connect?client=nope&model=a&url=http://x", headers=session)
    script = await gateway.client.get("/ui/api/connect?client=codex&model=a&url=javascript:x", headers=session)

    assert (told["client"], "claude" in told["clients"]) == ("codex", True)
    assert "http://studio.local:8484/x/v1" in told["files"][0]["text"]
    assert '"a"' in told["files"][0]["text"]
    assert "sk-mlxd" not in str(told)
    assert (wrong.status_code, script.status_code) == (400, 400)


async def test_no_body_is_an_internal_error(gateway: Gateway, session: dict[str, str]) -> None:
    unhandled = gateway.metrics.unhandled_errors
    bodies = (
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"model": 1}',
        b'{"name": null}',
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"a": 1e999}',
    )
    for method, path in api_routes(gateway):
        if method != "POST" or path.endswith(("/session", "/config/reload", "/clear")):
            continue
        for body in bodies:
            headers = session | {"content-type": "application/json"}
            answer = await gateway.client.post(path, content=body, headers=headers)
            expected = (200,) if path.endswith("/config/check") else (400, 413)
            assert answer.status_code in expected, (path, body[:20], answer.text)
    assert gateway.metrics.unhandled_errors == unhandled


# -- keys ------------------------------------------------------------------------------------------------------------


async def test_a_key_is_made_used_rotated_and_revoked(gateway: Gateway, session: dict[str, str], home: Path) -> None:
    async def status(secret: str) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        return (await gateway.client.post("/v1/chat/completions", json=chat(model="a"), headers=headers)).status_code

    made = await post(gateway, session, "keys/create", name="alice", models=["a*"], rpm=100)
    assert await status(made["secret"]) == 200
    listed = await get(gateway, session, "keys")
    (alice,) = (key for key in listed["keys"] if key["name"] == "alice")
    assert (alice["name"], alice["models"], alice["rpm"], alice["role"]) == ("alice", ["a*"], 100, "user")
    assert (alice["requests"], listed["is_open"]) == (1, False)
    assert not {"salt", "hash", "cache_salt", "secret"} & alice.keys()

    rotated = await post(gateway, session, "keys/rotate", name="alice")
    assert (await status(made["secret"]), await status(rotated["secret"])) == (401, 200)
    assert (await post(gateway, session, "keys/revoke", name="alice"))["name"] == "alice"
    assert await status(rotated["secret"]) == 401
    lines = [json.loads(line) for line in audit_path(home).read_text().splitlines()]
    own = [line for line in lines if line["target"] == "alice"]
    changes = [line for line in own if line["action"] != "key.address"]
    assert [line["action"] for line in changes] == ["key.create", "key.rotate", "key.revoke"]
    number = next(line["target"] for line in lines if line["action"] == "ui.login")
    assert all(line["client"].startswith(f"ui {number} 127.0.0.1:") for line in changes)


async def test_the_page_neither_makes_nor_touches_an_admin_key(
    gateway: Gateway, session: dict[str, str], home: Path
) -> None:
    keys = KeyFile(home / "keys" / "keys.json")
    keys.create(Key(name="boss", prefix="", salt="", hash="", is_admin=True))

    await post(gateway, session, "keys/create", 400, name="x", role="admin")
    await post(gateway, session, "keys/create", 400, name="x", is_admin=True)
    for verb in ("rotate", "revoke"):
        refused = await post(gateway, session, f"keys/{verb}", 403, name="boss")
        assert "mlxctl keys" in refused["error"]["message"]
    assert [key.name for key in keys.read()] == ["boss"]
    keys.revoke("boss")


@pytest.mark.parametrize(
    "body",
    [
        {"name": "<b>"},
        {"name": ""},
        {"name": "x", "rpm": -1},
        {"name": "x", "zap": 1},
        {"name": "x", "rpm": "9"},
        {"name": "x", "expires": 1e300},
    ],
)
async def test_a_key_that_cannot_be_is_refused_with_the_reason(
    gateway: Gateway, session: dict[str, str], body: dict[str, Any]
) -> None:
    refused = await gateway.client.post("/ui/api/keys/create", json=body, headers=session)
    assert refused.status_code == 400
    assert len(refused.json()["error"]["message"]) > 20


async def test_a_key_that_is_there_already_is_refused(gateway: Gateway, session: dict[str, str]) -> None:
    await post(gateway, session, "keys/create", name="twice", role="metrics")
    refused = await post(gateway, session, "keys/create", 400, name="twice")
    assert refused["error"]["code"] == "key_refused"
    await post(gateway, session, "keys/revoke", name="twice")
    assert (await post(gateway, session, "keys/revoke", 400, name="twice"))["error"]["code"] == "key_refused"


# -- logs and charts -------------------------------------------------------------------------------------------------


async def test_the_last_lines_of_the_log_are_filtered_by_level_model_and_text(
    gateway: Gateway, session: dict[str, str]
) -> None:
    config = gateway.app.services.config
    with LogSinks(file=RotatingFile(config.log_path, 1 << 20, 1)):
        log = logging.getLogger("gateway.test")
        log.info("one", extra={"fields": {"model": "a", "ms": 2}})
        log.warning("two <img src=x onerror=alert(1)>")
        log.info("three")
    lines = (await get(gateway, session, "logs"))["lines"]
    assert [line["message"] for line in lines] == ["one", "two <img src=x onerror=alert(1)>", "three"]
    assert lines[0]["fields"] == {"model": "a", "ms": 2}

    for query, messages in (
        ("level=warning", ["two"]),
        ("model=a", ["one"]),
        ("text=THREE", ["three"]),
        ("lines=1", ["three"]),
    ):
        shown = (await get(gateway, session, f"logs?{query}"))["lines"]
        assert [line["message"].split()[0] for line in shown] == messages, query
    for query in ("lines=0", "lines=1001", "lines=x", "level=loud"):
        assert (await gateway.client.get(f"/ui/api/logs?{query}", headers=session)).status_code == 400


async def test_charts_have_a_point_for_each_second_and_the_tokens_in_it(
    gateway: Gateway, session: dict[str, str]
) -> None:
    backend = gateway.app.backend
    backend.sampler.sample()
    backend.sampler.sample()
    await gateway.client.post("/v1/chat/completions", json=chat(model="a", max_tokens=20), headers=session)
    backend.sampler.sample()

    charts = await get(gateway, session, "history")

    chart = charts["models"]["a"]
    assert charts["interval_s"] == 1.0
    assert len({len(numbers) for numbers in chart.values()}) == 1
    assert chart["tokens_per_s"][-2] == 0
    assert chart["tokens_per_s"][-1] > 0
    assert chart["prompt_tokens_per_s"][-1] > 0


async def test_charts_are_bounded(gateway: Gateway, session: dict[str, str]) -> None:
    backend = gateway.app.backend
    for _ in range(700):
        backend.sampler.sample()
    assert len((await get(gateway, session, "history"))["models"]["a"]["running"]) == 600
