"""`mlxctl config reload` and SIGHUP under streams: real workers on MLX, and the daemon as a process."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from tests.integration.test_chaos_gateway import Stream, wait_until
from tests.integration.test_resume import DEADLINE_S, Answer, Clients, check_equal, requests
from tests.support.ctl import ctl
from tests.support.daemon import ROOT, DaemonProcess, is_running, stream_text, write_config
from tests.support.pool import short_home, tokens, until
from tests.support.scale import patience, patient, scaled

pytestmark = pytest.mark.anyio
DAEMON = [sys.executable, "-m", "tests.support.scripted_daemon"]


class Daemon(DaemonProcess):
    """With what `mlxctl` sees of it."""

    def __enter__(self) -> Self:
        super().__enter__()
        # Made now: making one takes longer than the streams that a reload must hit.
        transport = httpx2.HTTPTransport(uds=str(self.home / "run" / "admin.sock"))
        self.admin = httpx2.Client(transport=transport, base_url="http://mlxd", timeout=patient(DEADLINE_S))
        return self

    def __exit__(self, *error: object) -> None:
        self.admin.close()
        super().__exit__(*error)

    def models(self) -> dict[str, dict[str, Any]]:
        return {model["name"]: model for model in self.admin.get("/v1/status").json()["models"]}

    def resumes(self, model: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        wanted = f'mlxd_request_resumes_total{{model="{model}"'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))

    def rewrite(self, old: str, new: str) -> None:
        path = self.home / "mlxd.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def reload(self) -> dict[str, list[str]]:
        """As `mlxctl` does, without the time that a process takes to start."""
        done = self.admin.post("/v1/config/reload", json={})
        assert done.status_code == 200, done.text
        return done.json()


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        write_config(path)
        yield path


@pytest.fixture
def daemon(home: Path, model_folder: Callable[[str], Path]) -> Iterator[Daemon]:
    """Two real models: `m`, which answers one token a step, so that it lasts, and `other`."""
    model = f'path = "{model_folder("qwen3")}"\nspeculate = "off"\nmax_running = 32\n'
    tables = "".join(f"[models.{name}]\n{model}" for name in ("m", "other"))
    (home / "mlxd.toml").write_text(f"[server]\nport = 0\n{tables}")
    with Daemon(home, module="gateway.main") as running:
        yield running


async def undisturbed(url: str, bodies: list[dict[str, Any]]) -> tuple[list[Answer], int]:
    """The answers, and how many characters came in streams."""
    clients = Clients(url)
    answers = await clients.run(bodies)
    assert {answer.status for answer in answers} == {200}
    return answers, clients.received


# -- no stream notices -----------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_no_stream_of_another_model_notices_a_reload(daemon: Daemon) -> None:
    bodies = requests(32, max_tokens=240)
    expected, total = await undisturbed(daemon.url, bodies)
    assert daemon.complete(model="other").status_code == 200
    before = daemon.models()
    daemon.rewrite("[models.other]", "[models.other]\ncontext = 300")
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: clients.received > total // 8, DEADLINE_S)
    done = await asyncio.to_thread(daemon.reload)
    assert not running.done(), "the reload must hit something"

    answers = await running
    check_equal(answers, expected)
    longest = [max(answer.pause_s for answer in found) for found in (expected, answers)]
    print("longest pause undisturbed and during the reload:", [round(pause_s, 3) for pause_s in longest])
    assert (done["restarted"], done["changed"]) == (["other"], ["models.other.context"])
    after = daemon.models()
    assert (after["m"]["pid"], after["m"]["epoch"]) == (before["m"]["pid"], before["m"]["epoch"])
    assert daemon.resumes("m") == 0
    await until(lambda: daemon.models()["other"]["context"] == 300, DEADLINE_S)


async def test_streams_of_a_model_that_is_changed_pause_and_go_on(daemon: Daemon) -> None:
    bodies = requests(scaled(16, 6), max_tokens=round(300 * min(patience(), 3)))
    expected, total = await undisturbed(daemon.url, bodies)
    # Fewer at once: what runs was admitted before.
    daemon.rewrite("max_running = 32\n[models.other]", "max_running = 8\n[models.other]")
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: clients.received > total // 8, DEADLINE_S)
    done = await asyncio.to_thread(daemon.reload)
    assert not running.done(), "the reload must hit something"

    check_equal(await running, expected)
    assert done["restarted"] == ["m"]
    await until(lambda: daemon.models()["m"]["epoch"] == 2)
    assert daemon.resumes("m") > 0


# -- the verb and the signal -----------------------------------------------------------------------------------------


def test_a_bad_file_changes_nothing_and_the_verb_tells_its_line(home: Path) -> None:
    with Daemon(home) as daemon:
        stream = Stream(daemon.url, max_tokens=300)
        before = daemon.models()
        path = home / "mlxd.toml"
        good = path.read_text()
        path.write_text(good.replace("[models.b]", "[models.b]\ncontxt = 3"))
        line = path.read_text().splitlines().index("contxt = 3") + 1
        done = ctl(home, "config", "reload")

        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"mlxctl: {path}:{line}: unknown key 'contxt' in [models.b]; did you mean 'context'?\n"
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: daemon.new_log().count("configuration not reloaded") == 2)
        assert stream_text(stream.finish()) == tokens(300)
        assert {name: model["pid"] for name, model in daemon.models().items()} == {
            name: model["pid"] for name, model in before.items()
        }


def test_sighup_adds_and_removes_models_and_a_removed_one_finishes_its_stream(home: Path) -> None:
    with Daemon(home) as daemon:
        stream = Stream(daemon.url, max_tokens=300)
        (pid,) = daemon.worker_pids()
        daemon.rewrite("[models.a]", "[models.c]")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(daemon.models()) == {"b", "c"})

        assert daemon.complete(model="a").status_code == 404
        assert daemon.complete(model="c").json()["choices"][0]["text"] == tokens(5)
        assert stream_text(stream.finish()) == tokens(300)
        wait_until(lambda: not is_running(pid))


def test_the_verb_tells_what_it_did_in_a_table_or_as_json(home: Path) -> None:
    with Daemon(home) as daemon:
        assert ctl(home, "config", "reload").stdout.split() == ["unchanged"]
        assert daemon.complete().status_code == 200
        daemon.rewrite("[models.a]", "[models.a]\ncontext = 99\n[models.a.profiles.p]\n[models.new]\n[models.a2]")
        daemon.rewrite("port = 0", 'port = 1\ndrain = "3s"')
        daemon.rewrite("[models.b]", "[models.b2]")
        rows = [re.split("  +", line) for line in ctl(home, "config", "reload").stdout.splitlines()]

        assert [row for row in rows if row[0] != "added"] == [
            ["removed", "b"],
            ["restarted", "a"],
            ["changed", "server.drain"],
            ["changed", "models.a.path"],
            ["changed", "models.a.context"],
            ["changed", "models.a.profiles"],
            ["needs restart", "server.port"],
        ]
        assert [row[1] for row in rows if row[0] == "added"] == ["new", "a2", "b2"]
        said = json.loads(ctl(home, "config", "reload", "--json").stdout)
        assert said == {"added": [], "removed": [], "restarted": [], "changed": [], "needs_restart": ["server.port"]}


def test_a_daemon_whose_terminal_closes_drains(home: Path) -> None:
    """A pseudo-terminal is hung up as a terminal's window does it: SIGHUP, and then there is no terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["MLXD_HOME"] = str(home)
        os.execv(sys.executable, DAEMON)
    log = home / "logs" / "mlxd.log"
    wait_until(lambda: log.exists() and "mlxd serves" in log.read_text())
    os.close(terminal)

    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)
    assert "SIGHUP: draining" in log.read_text()
    assert not (home / "run" / "admin.sock").exists()


def test_nohup_is_respected(home: Path) -> None:
    log = home / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["nohup", *DAEMON], cwd=ROOT, env=os.environ | {"MLXD_HOME": str(home)}, stdout=stderr, stderr=stderr
        )
    try:
        wait_until(lambda: b"mlxd serves" in log.read_bytes())
        write_config(home, ("changed",))
        process.send_signal(signal.SIGHUP)
        # One that it heeds, after the one that it ignores.
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(20)) == 0
        assert b"changed" not in log.read_bytes()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
