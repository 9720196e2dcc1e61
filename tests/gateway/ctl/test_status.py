import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

import protocol
from gateway.ctl.tables import duration, size
from tests.gateway.harness import WORKERS
from tests.support.ctl import COMMAND, ctl, started
from tests.support.scale import patient, scaled

DAEMON = """
import sys
from pathlib import Path
import msgspec
from gateway.config.load import load_config
from gateway.access.key import has_keys
from gateway.main import serve
home, worker = Path(sys.argv[1]), sys.argv[2]
command = lambda spec: [sys.executable, worker, spec.name, "--spec", msgspec.json.encode(spec).decode()]
sys.exit(serve(lambda: load_config(home, has_keys=has_keys), command=command))
"""
CONFIG = """
[server]
port = {port}
[models."org/m"]
aliases = ["default"]
[models.other]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """The home of a daemon that runs with scripted workers."""
    home = tmp_path_factory.mktemp("h")
    (home / "mlxd.toml").write_text(CONFIG.format(port=free_port()))
    command = [sys.executable, "-P", "-c", DAEMON, str(home), str(WORKERS / "talkative.py")]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + patient(15)
    while ctl(home, "status", "--json").returncode != 0:
        assert daemon.poll() is None
        assert time.monotonic() < deadline
    yield home
    daemon.send_signal(signal.SIGTERM)
    daemon.communicate(timeout=patient(20))


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_version_is_printed() -> None:
    nowhere = Path("/nonexistent")

    assert started(nowhere, "version").stdout == f"mlxctl {protocol.__version__}\n"
    assert json.loads(ctl(nowhere, "version", "--json").stdout) == {"version": protocol.__version__}


@pytest.mark.parametrize("words", [["status"], *scaled([["load", "m"]], []), ["chat", "m", "hi"]])
def test_a_daemon_that_does_not_run_is_said_so_with_its_own_exit_status(tmp_path: Path, words: list[str]) -> None:
    done = started(tmp_path, *words)

    assert done.returncode == 3
    assert "mlxd does not run" in done.stderr
    assert "mlxctl serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_verb_has_help_with_an_example(tmp_path: Path) -> None:
    for verb in ("serve", "status", "chat", "load", "unload", "restart", "version"):
        assert "Example: mlxctl" in ctl(tmp_path, verb, "--help").stdout


def test_parse_prints_the_events_of_a_raw_output_and_passes_every_option_on(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}]')
    raw = '<think>hm</think>Well<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'
    whole = ctl(tmp_path, "parse", "--parser", "qwen3", "--tools", str(tools), stdin=raw)
    pieces = ctl(tmp_path, "parse", "--parser", "qwen3", "--tools", str(tools), "--split", "3", "-", stdin=raw)
    kinds = [json.loads(line)["type"] for line in whole.stdout.splitlines()]

    assert whole.returncode == 0
    assert kinds == ["reasoning", "content", "tool_begin", "tool_args", "tool_end", "finish"]
    assert json.loads(whole.stdout.splitlines()[3])["text"] == '{"x": 1}'
    assert len(pieces.stdout.splitlines()) >= len(kinds)


def test_parse_refuses_an_unknown_parser_and_has_help_of_its_own(tmp_path: Path) -> None:
    refused = ctl(tmp_path, "parse", "--parser", "nonsense")

    assert refused.returncode == 2
    assert "unknown parser 'nonsense'" in refused.stderr
    assert "--start-in-reasoning" in ctl(tmp_path, "parse", "--help").stdout


def test_a_bad_command_line_is_exit_status_2(tmp_path: Path) -> None:
    assert started(tmp_path, "load").returncode == 2
    assert ctl(tmp_path, "nonsense").returncode == 2


def test_serve_refuses_a_bad_configuration_and_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text("[server]\nprot = 1\n")
    done = ctl(tmp_path, "serve")

    assert done.returncode == 78
    assert "mlxd.toml:2: unknown key 'prot'" in done.stderr


def test_status_is_a_table_for_people_and_json_for_scripts(home: Path) -> None:
    table = ctl(home, "status").stdout
    found = json.loads(ctl(home, "status", "--json").stdout)

    assert "MODEL" in table
    assert "org/m" in table
    assert "default" in table
    assert [model["name"] for model in found["models"]] == ["org/m", "other"]
    assert found["version"] == protocol.__version__
    assert found["home"] == str(home)
    assert found["is_draining"] is False


def test_a_model_is_loaded_restarted_and_unloaded(home: Path) -> None:
    assert ctl(home, "load", "other").stdout == "other is ready\n"
    first = _state(home, "other")["pid"]
    assert json.loads(ctl(home, "restart", "other", "--json").stdout) == {"model": "other", "state": "ready"}
    assert _state(home, "other")["pid"] != first
    assert ctl(home, "unload", "other").stdout == "other is stopped\n"
    assert _state(home, "other")["pid"] == 0


def test_a_model_is_pinned_and_unpinned_and_status_tells_of_its_memory(home: Path) -> None:
    assert ctl(home, "pin", "other").stdout == "other is pinned\n"
    assert ctl(home, "load", "other").returncode == 0
    pinned = _state(home, "other")
    assert pinned["is_pinned"] is True
    assert isinstance(pinned["share_bytes"], int)
    assert isinstance(pinned["floor_bytes"], int)
    assert pinned["share_bytes"] >= pinned["floor_bytes"] > 0
    table = ctl(home, "status").stdout
    assert "ready, pinned" in table
    assert " granted, " in table

    assert json.loads(ctl(home, "unpin", "other", "--json").stdout) == {"model": "other", "state": "ready"}
    assert _state(home, "other")["is_pinned"] is False
    assert ctl(home, "pin", "nope").returncode == 1


def test_an_unknown_model_is_refused_with_the_names_that_exist(home: Path) -> None:
    done = ctl(home, "load", "nope")

    assert done.returncode == 1
    assert "org/m, other" in done.stderr


def _state(home: Path, name: str) -> dict[str, object]:
    models = json.loads(ctl(home, "status", "--json").stdout)["models"]
    return next(model for model in models if model["name"] == name)


def test_chat_streams_the_answer(home: Path) -> None:
    said = json.dumps([["reasoning", "hm"], ["text", "Hello "], ["text", "there"], ["finish", "stop"]])
    done = ctl(home, "chat", "default", said)

    assert done.returncode == 0
    # Reasoning is for people; what is piped on is the answer.
    assert done.stdout == "Hello there\n"


def test_chat_gives_a_script_the_reasoning_too(home: Path) -> None:
    said = json.dumps([["reasoning", "hm"], ["text", "Hello "], ["text", "there"], ["finish", "stop"]])

    assert json.loads(ctl(home, "chat", "default", said, "--json").stdout) == {
        "content": "Hello there", "reasoning": "hm",
    }  # fmt: skip
    assert json.loads(ctl(home, "chat", "default", "--json", stdin=said).stdout)["reasoning"] == "hm"


def test_chat_takes_what_is_piped_in_and_its_options(home: Path) -> None:
    assert ctl(home, "chat", "org/m", "--max-tokens", "3", stdin="hi").stdout == "t0 t1 t2 \n"


def test_on_a_terminal_a_model_cannot_write_escape_sequences(home: Path) -> None:
    said = json.dumps([["text", "a\x1b]0;owned\x07b\n"], ["finish", "stop"]])
    parent, child = os.openpty()
    environment = os.environ | {"MLXD_HOME": str(home)}
    done = subprocess.run(
        [*COMMAND, "chat", "default", said], stdin=child, stdout=child, env=environment, timeout=patient(30)
    )
    shown = os.read(parent, 4096)
    os.close(parent)
    os.close(child)

    assert done.returncode == 0
    assert shown.replace(b"\r", b"") == b"a]0;ownedb\n\n"


def test_chat_with_an_unknown_model_fails_in_one_line(home: Path) -> None:
    done = ctl(home, "chat", "nope", "hi")

    assert done.returncode == 1
    assert re.fullmatch(r"mlxctl: The model 'nope' does not exist.*\n", done.stderr)


def test_sizes_and_durations_are_for_people() -> None:
    assert [size(count) for count in (0, 999, 1536, 5 << 30, 3 << 40)] == [
        "0 B", "999 B", "1.5 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 59, 61, 3600, 90061)] == ["0s", "59s", "1m 1s", "1h", "1d 1h"]
