"""Clients that run with nothing but the configuration that `mlxctl connect CLIENT --write` has written."""

import json
import shlex
from pathlib import Path

import anyio.to_thread
import pytest

from tests.clients.conftest import Workshop
from tests.clients.install import npm, pypi
from tests.support.ctl import ctl

pytestmark = pytest.mark.anyio

TASK = "What does proof.txt say?"
SEEING = Path(__file__).parents[2] / "worker" / "demo_vision"
OURS = ("CODEX_HOME", "XDG_CONFIG_HOME", "LLM_USER_PATH", "MLXD_KEY")


@pytest.fixture(autouse=True)
def user(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workshop's user, and a configuration of mlxd that names its model, which by its files takes images."""
    home = workshop.home / ".mlxd"
    home.mkdir()
    (home / "mlxd.toml").write_text(f'[models.m]\npath = "{SEEING}"\ncontext = 32768\n')
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(workshop.home))


async def connected(workshop: Workshop, client: str) -> list[str]:
    """The words of the command that starts a client, once its files are written, twice."""
    words = ("connect", client, "--write", "--url", workshop.url, "--json")
    for _ in range(2):
        done = await anyio.to_thread.run_sync(lambda: ctl(workshop.home / ".mlxd", *words))
        assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(file["is_unchanged"] for file in told["files"])
    return shlex.split(told["command"])


async def run(workshop: Workshop, bin: Path, client: str, *options: str, env: dict[str, str] | None = None) -> str:
    name, *words = await connected(workshop, client)
    # As a shell reads it.
    words = [word.replace("~", str(workshop.home)) for word in words]
    return await workshop.run([bin / name, *words, *options], env)


async def test_claude_code(workshop: Workshop) -> None:
    bin = npm("claude", "@anthropic-ai/claude-code")
    said = await run(workshop, bin, "claude", "-p", TASK, "--output-format", "json", "--allowedTools", "Bash")

    assert workshop.secret in json.loads(said.splitlines()[-1])["result"]


async def test_codex(workshop: Workshop) -> None:
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", TASK)
    said = await run(workshop, npm("codex", "@openai/codex@0.169.0"), "codex", *options)

    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert any("It says" in text and workshop.secret in text for text in texts), said


async def test_opencode(workshop: Workshop) -> None:
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    env = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    said = await run(workshop, npm("opencode", "opencode-ai"), "opencode", "run", TASK, env=env)

    assert f"It says: {workshop.secret}" in said


async def test_pi(workshop: Workshop) -> None:
    bin = npm("pi", "@mariozechner/pi-coding-agent@0.73.1")
    said = await run(workshop, bin, "pi", "--no-session", "-p", TASK, env={"PI_OFFLINE": "1"})

    assert f"It says: {workshop.secret}" in said


async def test_continue(workshop: Workshop) -> None:
    said = await run(workshop, npm("continue", "@continuedev/cli@1.5.47"), "continue", "--auto", "-p", TASK)

    assert f"It says: {workshop.secret}" in said


async def test_qwen_code(workshop: Workshop) -> None:
    bin = npm("qwen", "@qwen-code/qwen-code@0.15.10")
    said = await run(workshop, bin, "qwen", "--approval-mode", "yolo", "-p", TASK)

    assert workshop.secret in said


async def test_aider_edits_a_file(workshop: Workshop) -> None:
    (workshop.folder / "new.txt").write_text("old\n")
    options = (
        *("--edit-format", "whole", "--yes-always", "--no-git", "--no-analytics", "--analytics-disable"),
        *("--no-check-update", "--no-show-model-warnings"),
        *("--message", f"<<<new.txt\n```\n{workshop.secret}\n```\n>>>", "new.txt"),
    )
    await run(workshop, pypi("aider", "aider-chat==0.86.2"), "aider", *options)

    assert (workshop.folder / "new.txt").read_text() == f"{workshop.secret}\n"


async def test_llm(workshop: Workshop) -> None:
    said = await run(workshop, pypi("llm", "llm==0.36"), "llm", "-T", "llm_version", "Which version is this?")

    assert "It says: 0.36" in said
