"""Settings of each client for this mlxd, equal to those in docs/clients.md and tested by `make test-clients`."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from gateway.client_setup.config_edit import ConfigEdit, FileFormat
from gateway.failed import CommandFailed

DEFAULT_CONTEXT: Final = 32768
# Clients require some key even while mlxd has none.
NO_KEY: Final = "x"
_ANSWER_MAX: Final = 8192


class Endpoint(Struct, frozen=True):
    """Address of mlxd with a model and a key. The key may be empty. `takes_images` is true for a vision model."""

    url: str
    model: str
    context: int = DEFAULT_CONTEXT
    key: str = ""
    takes_images: bool = False

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    @property
    def some_key(self) -> str:
        return self.key or NO_KEY

    @property
    def inputs(self) -> list[str]:
        """Modalities that the client may send."""
        return ["text", "image"] if self.takes_images else ["text"]

    @property
    def max_answer_tokens(self) -> int:
        """Maximum tokens of an answer, at most a quarter of the context."""
        return min(_ANSWER_MAX, self.context // 4)


class Setup(Struct, frozen=True):
    """Settings of one client: edits of its configuration files, and the command that starts the client."""

    client: str
    edits: tuple[ConfigEdit, ...]
    command: str
    note: str = ""


def setup(client: str, endpoint: Endpoint) -> Setup:
    """Make the settings for a client. Raises `CommandFailed` if the name is unknown."""
    try:
        make = CLIENTS[client]
    except KeyError:
        raise CommandFailed(
            f"unknown client {client!r}; known are {', '.join(CLIENTS)}. docs/clients.md has more"
        ) from None
    return make(endpoint)


def _claude(to: Endpoint) -> Setup:
    env = {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.some_key,
        "ANTHROPIC_MODEL": to.model,
        "ANTHROPIC_SMALL_FAST_MODEL": to.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Setup(
        "claude",
        (ConfigEdit("~/.claude/settings.json", FileFormat.JSON, {"env": env}, has_key=bool(to.key)),),
        "claude",
    )


def _codex(to: Endpoint) -> Setup:
    provider = {
        "name": "mlxd",
        "base_url": to.openai,
        "wire_api": "responses",
        "stream_idle_timeout_ms": 600000,
    } | ({"env_key": "MLXD_KEY"} if to.key else {})
    content = {
        "model": to.model,
        "model_provider": "mlxd",
        "web_search": "disabled",
        "model_providers": {"mlxd": provider},
    }
    folder = os.environ.get("CODEX_HOME") or "~/.codex"
    return Setup(
        "codex",
        (ConfigEdit(f"{folder}/config.toml", FileFormat.TOML, content),),
        "MLXD_KEY=… codex" if to.key else "codex",
        "Codex reads the key from the variable MLXD_KEY." if to.key else "",
    )


def _opencode(to: Endpoint) -> Setup:
    model = {
        "tool_call": True,
        "reasoning": True,
        "limit": {"context": to.context, "output": to.max_answer_tokens},
        "modalities": {"input": to.inputs, "output": ["text"]},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": to.openai, "apiKey": to.some_key},
        "models": {to.model: model},
    }
    content = {"model": f"mlxd/{to.model}", "small_model": f"mlxd/{to.model}", "provider": {"mlxd": provider}}
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    edit = ConfigEdit(f"{folder}/opencode/opencode.json", FileFormat.JSON, content, has_key=bool(to.key))
    return Setup("opencode", (edit,), "opencode")


def _aider(to: Endpoint) -> Setup:
    content = {
        "model": f"openai/{to.model}",
        "weak-model": f"openai/{to.model}",
        "openai-api-base": to.openai,
        "openai-api-key": to.some_key,
    }
    return Setup("aider", (ConfigEdit("~/.aider.conf.yml", FileFormat.YAML, content, has_key=bool(to.key)),), "aider")


def _pi(to: Endpoint) -> Setup:
    model = {
        "id": to.model,
        "name": to.model,
        "reasoning": True,
        "input": to.inputs,
        "contextWindow": to.context,
        "maxTokens": to.max_answer_tokens,
    }
    provider = {"baseUrl": to.openai, "api": "openai-completions", "apiKey": to.some_key, "models": [model]}
    content = {"providers": {"mlxd": provider}}
    edit = ConfigEdit("~/.pi/agent/models.json", FileFormat.JSON, content, item_key="id", has_key=bool(to.key))
    return Setup("pi", (edit,), f"pi --provider mlxd --model {to.model}")


def _continue(to: Endpoint) -> Setup:
    model = {
        "name": "mlxd",
        "provider": "openai",
        "model": to.model,
        "apiBase": to.openai,
        "apiKey": to.some_key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", "image_input"] if to.takes_images else ["tool_use"],
    }
    path = "~/.continue/config.yaml"
    defaults = {"name": "local", "version": "1.0.0", "schema": "v1"}
    edit = ConfigEdit(
        path, FileFormat.YAML, {"models": [model]}, defaults=defaults, item_key="name", has_key=bool(to.key)
    )
    return Setup("continue", (edit,), f"cn --config {path}", "The extension reads the same file.")


def _qwen(to: Endpoint) -> Setup:
    variables = {"OPENAI_BASE_URL": to.openai, "OPENAI_API_KEY": to.some_key, "OPENAI_MODEL": to.model}
    return Setup(
        "qwen",
        (ConfigEdit("~/.qwen/.env", FileFormat.ENV, variables, has_key=bool(to.key)),),
        "qwen --auth-type openai",
    )


def _llm(to: Endpoint) -> Setup:
    model = {
        "model_id": "mlxd",
        "model_name": to.model,
        "api_base": to.openai,
        "api_key_name": "mlxd",
        "supports_tools": True,
        "supports_schema": True,
    }
    own = "~/Library/Application Support" if sys.platform == "darwin" else "~/.config"
    folder = os.environ.get("LLM_USER_PATH") or f"{own}/io.datasette.llm"
    edits = (
        ConfigEdit(f"{folder}/extra-openai-models.yaml", FileFormat.YAML, [model], item_key="model_id"),
        ConfigEdit(f"{folder}/keys.json", FileFormat.JSON, {"mlxd": to.some_key}, has_key=bool(to.key)),
    )
    return Setup("llm", edits, "llm -m mlxd")


CLIENTS: Final[Mapping[str, Callable[[Endpoint], Setup]]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "aider": _aider,
    "pi": _pi,
    "continue": _continue,
    "qwen": _qwen,
    "llm": _llm,
}


def as_data(setup: Setup) -> dict[str, Any]:
    """Convert the settings to JSON. Each file has the text that is to be merged into it."""
    files = [{"path": edit.path, "form": edit.form, "text": edit.fragment()} for edit in setup.edits]
    return {"client": setup.client, "files": files, "command": setup.command, "note": setup.note}
