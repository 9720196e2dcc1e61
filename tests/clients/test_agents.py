"""Agents as they come from npm and PyPI: each calls a tool, sends its result back, and tells what came of it."""

import json

import pytest

from tests.clients.conftest import Workshop
from tests.clients.install import npm, pypi

pytestmark = pytest.mark.anyio

TASK = "What does proof.txt say?"


@pytest.mark.parametrize("key", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
async def test_claude_code(workshop: Workshop, key: str) -> None:
    claude = npm("claude", "@anthropic-ai/claude-code") / "claude"
    env = {
        "ANTHROPIC_BASE_URL": workshop.url,
        key: "x",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    said = await workshop.run([claude, "-p", TASK, "--output-format", "json", "--allowedTools", "Bash"], env)

    answer = json.loads(said.splitlines()[-1])
    assert answer["is_error"] is False
    assert workshop.secret in answer["result"]
    assert answer["num_turns"] == 2


@pytest.mark.parametrize("api", ["openai-compatible", "openai", "anthropic"])
async def test_opencode(workshop: Workshop, api: str) -> None:
    opencode = npm("opencode", "opencode-ai") / "opencode"
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["mlxd"],
        "model": "mlxd/m",
        "small_model": "mlxd/m",
        "provider": {
            "mlxd": {
                "npm": f"@ai-sdk/{api}",
                "options": {"baseURL": f"{workshop.url}/v1", "apiKey": "x"},
                "models": {"m": {"tool_call": True, "reasoning": True, "limit": {"context": 32768, "output": 4096}}},
            }
        },
    }
    config = workshop.home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(settings))
    env = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    said = await workshop.run([opencode, "run", TASK], env | {"OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"})

    assert f"It says: {workshop.secret}" in said


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
async def test_pi(workshop: Workshop, api: str) -> None:
    pi = npm("pi", "@mariozechner/pi-coding-agent@0.73.1") / "pi"
    base = workshop.url if api == "anthropic-messages" else f"{workshop.url}/v1"
    model = {"id": "m", "name": "m", "reasoning": True, "input": ["text"], "contextWindow": 32768, "maxTokens": 4096}
    provider = {"baseUrl": base, "api": api, "apiKey": "x", "models": [model]}
    config = workshop.home / ".pi" / "agent" / "models.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"providers": {"mlxd": provider}}))
    options = ["--provider", "mlxd", "--model", "m", "--thinking", "low", "--no-session", "-p", TASK]
    said = await workshop.run([pi, *options], {"PI_OFFLINE": "1"})

    assert f"It says: {workshop.secret}" in said


async def test_aider_edits_a_file(workshop: Workshop) -> None:
    aider = pypi("aider", "aider-chat==0.86.2") / "aider"
    (workshop.folder / "new.txt").write_text("old\n")
    options = [
        *("--model", "openai/m", "--weak-model", "openai/m", "--edit-format", "whole", "--yes-always", "--no-git"),
        *("--no-analytics", "--analytics-disable", "--no-check-update", "--no-show-model-warnings"),
        *("--message", f"<<<new.txt\n```\n{workshop.secret}\n```\n>>>", "new.txt"),
    ]
    await workshop.run([aider, *options], {"OPENAI_API_BASE": f"{workshop.url}/v1", "OPENAI_API_KEY": "x"})

    assert (workshop.folder / "new.txt").read_text() == f"{workshop.secret}\n"


async def test_llm(workshop: Workshop) -> None:
    llm = pypi("llm", "llm==0.36") / "llm"
    home = workshop.home / "llm"
    home.mkdir()
    model = f"- model_id: mlxd\n  model_name: m\n  api_base: {workshop.url}/v1\n  supports_tools: true\n"
    (home / "extra-openai-models.yaml").write_text(model)
    command = [llm, "-m", "mlxd", "--key", "x", "-T", "llm_version", "Which version is this?"]
    said = await workshop.run(command, {"LLM_USER_PATH": str(home)})

    assert "It says: 0.36" in said


async def test_continue(workshop: Workshop) -> None:
    cn = npm("continue", "@continuedev/cli@1.5.47") / "cn"
    config = workshop.home / "config.yaml"
    config.write_text(
        f"""
name: local
version: 1.0.0
schema: v1
models:
  - name: mlxd
    provider: openai
    model: m
    apiBase: {workshop.url}/v1
    apiKey: x
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
    )
    said = await workshop.run([cn, "--config", config, "--auto", "-p", TASK])

    assert f"It says: {workshop.secret}" in said


async def test_qwen_code(workshop: Workshop) -> None:
    qwen = npm("qwen", "@qwen-code/qwen-code@0.15.10") / "qwen"
    env = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{workshop.url}/v1", "OPENAI_MODEL": "m"}
    said = await workshop.run([qwen, "--auth-type", "openai", "--approval-mode", "yolo", "-p", TASK], env)

    assert workshop.secret in said


@pytest.mark.parametrize("by_websocket", [False, True])
async def test_codex(workshop: Workshop, by_websocket: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gateway.middleware.access_log")
    codex = npm("codex", "@openai/codex@0.171.0") / "codex"
    home = workshop.home / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f"""
        model = "m"
        model_provider = "mlxd"
        check_for_update_on_startup = false
        web_search = "disabled"
        [analytics]
        enabled = false
        [feedback]
        enabled = false
        [model_providers.mlxd]
        name = "mlxd"
        base_url = "{workshop.url}/v1"
        wire_api = "responses"
        env_key = "MLXD_KEY"
        supports_websockets = {str(by_websocket).lower()}
        """
    )
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", TASK]
    said = await workshop.run([codex, *options], {"CODEX_HOME": str(home), "MLXD_KEY": "x"})

    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [answer] = [item["text"] for item in items if item["type"] == "agent_message" and "It says" in item["text"]]
    assert workshop.secret in answer
    sockets = [record for record in caplog.records if record.getMessage() == "GET /v1/responses"]
    assert bool(sockets) is by_websocket
