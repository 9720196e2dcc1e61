"""Clients of this mlxd: their settings, and their start for one run.

Settings of each client for this mlxd, which `mlxctl connect` prints and `make test-clients` tests.

Start of clients for this mlxd by variables and arguments, for one run; the client's own files stay as they are.

What a client reads only from a file stands in a temporary folder.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from gateway.client_setup.config_edit import ConfigEdit, FileFormat, NotEditable
from gateway.command_failed import CommandFailed

DEFAULT_CONTEXT: Final = 32768
# Value in place of a key: clients require a key even if mlxd has none.
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


class Client(Struct, frozen=True):
    """A client: the function that makes its settings, the command that installs it, and the context that its
    instructions, its tools and some turns need.
    """

    make: Callable[[Endpoint], Setup]
    install: str
    context_min: int
    uses_tools: bool = True


def client_of(name: str) -> Client:
    """Return the client of a name or an alias. Raises `CommandFailed` if there is none."""
    try:
        return CLIENTS[canonical(name)]
    except KeyError:
        raise CommandFailed(
            f"unknown client {name!r}; known are {', '.join(CLIENTS)}. docs/clients.md has more"
        ) from None


def canonical(name: str) -> str:
    """Return the name of a client for one of its other names, in any case."""
    return ALIASES.get(name.lower(), name.lower())


def setup(client: str, endpoint: Endpoint) -> Setup:
    """Make the settings for a client. Raises `CommandFailed` if the name is unknown."""
    return client_of(client).make(endpoint)


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


def _goose(to: Endpoint) -> Setup:
    content = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": to.model,
        "GOOSE_CONTEXT_LIMIT": to.context,
        "OPENAI_HOST": to.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
    }
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Setup(
        "goose",
        (ConfigEdit(f"{folder}/goose/config.yaml", FileFormat.YAML, content),),
        f"OPENAI_API_KEY={'…' if to.key else NO_KEY} goose session",
        "Goose reads the key from the variable OPENAI_API_KEY, or from its own store.",
    )


def _zed(to: Endpoint) -> Setup:
    model = {
        "name": to.model,
        "max_tokens": to.context,
        "capabilities": {"tools": True, "images": to.takes_images},
    }
    content = {
        "agent": {"default_model": {"provider": "mlxd", "model": to.model}},
        "language_models": {"openai_compatible": {"mlxd": {"api_url": to.openai, "available_models": [model]}}},
    }
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    edit = ConfigEdit(f"{folder}/zed/settings.json", FileFormat.JSON, content, item_key="name")
    return Setup(
        "zed",
        (edit,),
        f"MLXD_API_KEY={'…' if to.key else NO_KEY} zed",
        "Zed reads the key from the variable MLXD_API_KEY, or from its agent's settings.",
    )


def _cursor(to: Endpoint) -> Setup:
    note = (
        "Cursor has no file for this. In Settings, Models, API Keys enter:\n"
        f"  OpenAI API key            {to.key or 'a key of mlxctl keys create cursor'}\n"
        f"  Override OpenAI Base URL  {to.openai}\n"
        f"  custom model              {to.model}\n"
        "Cursor's servers call this address, not your machine: it has to be reachable from the internet over HTTPS, "
        "and mlxd needs a key (docs/clients.md)."
    )
    return Setup("cursor", (), "", note)


# Contexts hold the instructions and tools that each client sends (49 to 78 kB for Claude Code and qwen-code, 40 for
# Codex, 31 for opencode, 3 to 9 for the others; about four bytes a token), and some turns.
CLIENTS: Final[Mapping[str, Client]] = {
    "claude": Client(_claude, "npm install -g @anthropic-ai/claude-code", 32768),
    "codex": Client(_codex, "npm install -g @openai/codex", 32768),
    "opencode": Client(_opencode, "npm install -g opencode-ai", 24576),
    "aider": Client(_aider, "uv tool install --python 3.12 aider-chat", 8192, uses_tools=False),
    "pi": Client(_pi, "npm install -g @mariozechner/pi-coding-agent", 16384),
    "continue": Client(_continue, "npm install -g @continuedev/cli", 16384),
    "qwen": Client(_qwen, "npm install -g @qwen-code/qwen-code", 32768),
    "goose": Client(
        _goose, "curl -fsSL https://github.com/block/goose/releases/download/stable/download_cli.sh | bash", 16384
    ),
    "zed": Client(_zed, "curl -f https://zed.dev/install.sh | sh", 16384),
    "llm": Client(_llm, "uv tool install llm", 2048, uses_tools=False),
    "cursor": Client(_cursor, "", 32768),
}
ALIASES: Final = {
    "claude-code": "claude",
    "claudecode": "claude",
    "opencode-ai": "opencode",
    "aider-chat": "aider",
    "cn": "continue",
    "qwen-code": "qwen",
    "zeditor": "zed",
}


def as_data(setup: Setup) -> dict[str, Any]:
    """Convert the settings to JSON. Each file has the text that is to be merged into it."""
    files = [{"path": edit.path, "form": edit.form, "text": edit.fragment()} for edit in setup.edits]
    return {"client": setup.client, "files": files, "command": setup.command, "note": setup.note}


class Launch(Struct, frozen=True):
    """Command of one run. `removed` are variables of the user that would send the client elsewhere.

    `arguments` precede those of the user; `default` are the arguments if the user has none.
    """

    program: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    removed: tuple[str, ...] = ()
    default: tuple[str, ...] = ()


def programs() -> list[str]:
    """List the clients that can be started."""
    return list(_LAUNCHES)


def program_of(client: str) -> str:
    """Return the name of a client's program. Raises `CommandFailed` for a client that no program starts."""
    client_of(client)
    try:
        return _LAUNCHES[canonical(client)][0]
    except KeyError:
        raise CommandFailed(
            f"mlxctl launch does not start {canonical(client)}, but {', '.join(_LAUNCHES)}; "
            f"its settings are printed by: mlxctl connect {canonical(client)}"
        ) from None


def launch(client: str, to: Endpoint, folder: Path) -> Launch:
    """Make the command that starts a client, and write what it needs into the temporary `folder`, which only its owner
    can read. Raises `CommandFailed`.
    """
    program_of(client)
    try:
        return _LAUNCHES[canonical(client)][1](to, folder)
    except NotEditable as error:
        raise CommandFailed(f"{setup(client, to).edits[0].path} cannot be used: {error}") from None


def _content(client: str, to: Endpoint) -> dict[str, Any]:
    """Return the settings that `mlxctl connect` writes into the client's first file."""
    content = setup(client, to).edits[0].content
    assert isinstance(content, dict)
    return content


def _launch_claude(to: Endpoint, folder: Path) -> Launch:
    content = _content("claude", to)
    # Claude Code applies the `env` of its settings over its environment, so variables alone would lose to the file
    # that `mlxctl connect claude --write` makes. Settings of the command line precede that file.
    settings = folder / "settings.json"
    settings.write_text(json.dumps(content))
    others = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    return Launch("claude", ("--settings", str(settings)), content["env"], others)


def _launch_codex(to: Endpoint, _: Path) -> Launch:
    flags = [
        word
        for name, value in _leaves(_content("codex", to))
        for word in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
    ]
    return Launch("codex", tuple(flags), {"MLXD_KEY": to.key} if to.key else {})


def _launch_opencode(to: Endpoint, _: Path) -> Launch:
    return Launch("opencode", (), {"OPENCODE_CONFIG_CONTENT": json.dumps(_content("opencode", to))})


def _launch_aider(to: Endpoint, _: Path) -> Launch:
    options = _content("aider", to)
    return Launch("aider", (), {f"AIDER_{name.upper().replace('-', '_')}": value for name, value in options.items()})


def _launch_pi(to: Endpoint, folder: Path) -> Launch:
    edit = setup("pi", to).edits[0]
    own = Path(edit.path).expanduser()
    # The user's sessions, settings and log-ins stay where they are.
    for entry in own.parent.iterdir() if own.parent.is_dir() else ():
        if entry.name != own.name:
            (folder / entry.name).symlink_to(entry.resolve())
    try:
        before = own.read_text(encoding="utf-8")
    except FileNotFoundError:
        before = ""
    except (OSError, UnicodeDecodeError) as error:
        raise NotEditable(str(error)) from None
    (folder / own.name).write_text(edit.merged(before), encoding="utf-8")
    return Launch("pi", ("--provider", "mlxd", "--model", to.model), {"PI_CODING_AGENT_DIR": str(folder)})


def _launch_continue(to: Endpoint, folder: Path) -> Launch:
    file = folder / "config.yaml"
    file.write_text(setup("continue", to).edits[0].fragment(), encoding="utf-8")
    return Launch("cn", ("--config", str(file)), {})


def _launch_qwen(to: Endpoint, _: Path) -> Launch:
    return Launch("qwen", ("--auth-type", "openai", "--model", to.model), _content("qwen", to))


def _launch_goose(to: Endpoint, _: Path) -> Launch:
    env = {name: str(value) for name, value in _content("goose", to).items()} | {"OPENAI_API_KEY": to.some_key}
    return Launch("goose", (), env, default=("session",))


def _launch_zed(to: Endpoint, folder: Path) -> Launch:
    (folder / "config").mkdir(mode=0o700)
    (folder / "config" / "settings.json").write_text(setup("zed", to).edits[0].fragment(), encoding="utf-8")
    # Without `--foreground` the command ends as soon as the window is open.
    return Launch("zed", ("--foreground", "--user-data-dir", str(folder)), {"MLXD_API_KEY": to.some_key})


def _leaves(content: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their dotted names."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{start}{name}.")  # type: ignore[reportUnknownArgumentType]
        else:
            yield f"{start}{name}", value


_LAUNCHES: Final[Mapping[str, tuple[str, Callable[[Endpoint, Path], Launch]]]] = {
    "claude": ("claude", _launch_claude),
    "codex": ("codex", _launch_codex),
    "opencode": ("opencode", _launch_opencode),
    "aider": ("aider", _launch_aider),
    "pi": ("pi", _launch_pi),
    "qwen": ("qwen", _launch_qwen),
    "goose": ("goose", _launch_goose),
    "continue": ("cn", _launch_continue),
    "zed": ("zed", _launch_zed),
}
