"""The tutorial, as a reader follows it: every command is run, and prints what the page says."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.model_files.metadata import find
from tests.support.ctl import install
from tests.support.daemon import ROOT, DaemonProcess
from tests.support.hub import Hub, model_repo
from tests.support.pool import short_home
from tests.support.scale import patient

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
PULLED = "mlx-community/Qwen3-4B-4bit"
# Between the outputs of two blocks.
MARK = "=== block ==="
TIMEOUT_S = 120
# A client that is no agent of its own: it has the model of its settings follow its last argument by the page's agent.
STAND_IN = """import json, os, subprocess, sys
model = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])["model"].removeprefix("mlxd/")
assert sys.argv[1] == "run"
sys.exit(subprocess.run([sys.executable, "agent.py", model, sys.argv[2]]).returncode)
"""


def blocks() -> list[tuple[str, str]]:
    """The page's fenced blocks: their languages and texts."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_tutorial_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("there is no curl or no bash")
    [(language, first), *rest] = blocks()
    assert (language, first) == ("sh", "make serve\n")
    clone = a_clone(tmp_path)
    with short_home() as home, Hub({PULLED: model_repo(find("demo"))}) as hub:
        for name, value in hub.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        (home / "mlxd.toml").write_text("[server]\nport = 0\n")
        # What `make serve` does once it has set up `.venv`.
        with DaemonProcess(home, module="gateway.main") as daemon:
            done = subprocess.run(
                ["bash", "-e", "-c", script(rest).replace("http://127.0.0.1:8484", daemon.url)],
                cwd=clone,
                env=os.environ | {"MLXD_HOME": str(home), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=patient(TIMEOUT_S),
            )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.split(f"{MARK}\n")[1:]
    commands = [at for at, (language, _) in enumerate(rest) if language == "sh"]
    assert len(printed) == len(commands)
    outputs = dict(zip(commands, printed, strict=True))
    for at, (language, text) in enumerate(rest):
        if language == "text":
            wanted = ".*".join(map(re.escape, text.strip().split("…")))
            assert re.fullmatch(wanted, outputs[at - 1].strip(), re.DOTALL), outputs[at - 1]
    assert (clone / "first-agent" / "pets.txt").read_text() == "A fox and a bird.\n"


def script(steps: list[tuple[str, str]]) -> str:
    """The blocks as one script, so that a change of folder holds for the next; a program is saved where it is shown."""
    lines: list[str] = []
    for language, text in steps:
        match language:
            case "sh":
                lines += [f"echo {shlex.quote(MARK)}", text]
            case "python":
                lines.append(f"cat > agent.py <<'END'\n{text}END")
            case _:
                assert language == "text", language
    return "\n".join(lines)


def a_clone(folder: Path) -> Path:
    """A folder with the programs that `make serve` puts into `.venv`, and with an agent that a reader has installed."""
    (folder / "stand_in.py").write_text(STAND_IN)
    install(folder / "clone" / ".venv" / "bin", opencode=str(folder / "stand_in.py"))
    return folder / "clone"
