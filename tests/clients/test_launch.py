"""Clients that run with nothing but what `mlxctl launch` gives them, beside files of their own that say otherwise."""

import json
from pathlib import Path

import pytest

from gateway.client_setup.clients import Endpoint, launch
from tests.clients.conftest import Workshop
from tests.clients.install import npm, pypi

pytestmark = pytest.mark.anyio

TASK = "What does proof.txt say?"
# Where no server is.
ELSEWHERE = "http://127.0.0.1:9"


async def run(
    workshop: Workshop, bin: Path, client: str, *words: str, env: dict[str, str] | None = None, own: str = ":"
) -> str:
    """Run a client whose own file is `own`, as `PATH:TEXT`, if it has one."""
    folder = workshop.home / "once"
    folder.mkdir()
    name, text = own.split(":", 1)
    file = workshop.home / name
    if name:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = launch(client, Endpoint(workshop.url, "m", 65536), folder)
    said = await workshop.run([bin / command.program, *command.arguments, *words], command.env | (env or {}))
    assert not name or file.read_text() == text
    return said


async def test_claude_code(workshop: Workshop) -> None:
    bin = npm("claude", "@anthropic-ai/claude-code")
    other = json.dumps({"env": {"ANTHROPIC_BASE_URL": ELSEWHERE, "ANTHROPIC_MODEL": "other"}})
    words = ("-p", TASK, "--output-format", "json", "--allowedTools", "Bash")
    said = await run(workshop, bin, "claude", *words, own=f".claude/settings.json:{other}")

    assert workshop.secret in json.loads(said.splitlines()[-1])["result"]


async def test_codex(workshop: Workshop) -> None:
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", TASK)
    bin = npm("codex", "@openai/codex@0.169.0")
    said = await run(workshop, bin, "codex", *words)

    # The answer, not the output of the tool.
    assert any("It says" in line and workshop.secret in line for line in said.splitlines()), said


async def test_opencode(workshop: Workshop) -> None:
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    env = {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    # It adds the schema to its file, if the file has none.
    own = '.config/opencode/opencode.json:{"$schema": "https://opencode.ai/config.json", "model": "other/one"}'
    said = await run(workshop, npm("opencode", "opencode-ai"), "opencode", "run", TASK, env=env, own=own)

    assert f"It says: {workshop.secret}" in said


async def test_pi(workshop: Workshop) -> None:
    bin = npm("pi", "@mariozechner/pi-coding-agent@0.73.1")
    own = f'.pi/agent/models.json:{{"providers": {{"mlxd": {{"baseUrl": "{ELSEWHERE}/v1"}}}}}}'
    words = ("--no-session", "-p", TASK)
    said = await run(workshop, bin, "pi", *words, env={"PI_OFFLINE": "1"}, own=own)

    assert f"It says: {workshop.secret}" in said


async def test_continue(workshop: Workshop) -> None:
    said = await run(workshop, npm("continue", "@continuedev/cli@1.5.47"), "continue", "--auto", "-p", TASK)

    assert f"It says: {workshop.secret}" in said


async def test_qwen_code(workshop: Workshop) -> None:
    bin = npm("qwen", "@qwen-code/qwen-code@0.15.10")
    own = f".qwen/.env:OPENAI_BASE_URL={ELSEWHERE}/v1\nOPENAI_MODEL=other\n"
    said = await run(workshop, bin, "qwen", "--approval-mode", "yolo", "-p", TASK, own=own)

    assert workshop.secret in said


async def test_aider_edits_a_file(workshop: Workshop) -> None:
    (workshop.folder / "new.txt").write_text("old\n")
    words = (
        *("--edit-format", "whole", "--yes-always", "--no-git", "--no-analytics", "--analytics-disable"),
        *("--no-check-update", "--no-show-model-warnings"),
        *("--message", f"<<<new.txt\n```\n{workshop.secret}\n```\n>>>", "new.txt"),
    )
    own = f".aider.conf.yml:openai-api-base: {ELSEWHERE}/v1\nmodel: openai/other\n"
    await run(workshop, pypi("aider", "aider-chat==0.86.2"), "aider", *words, own=own)

    assert (workshop.folder / "new.txt").read_text() == f"{workshop.secret}\n"
