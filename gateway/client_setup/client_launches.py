"""Start of clients for this mlxd by variables and arguments, for one run; the client's own files stay as they are.

What a client reads only from a file stands in a temporary folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from gateway.client_setup.client_setups import Endpoint, canonical, client_of, setup
from gateway.client_setup.config_edit import NotEditable
from gateway.failed import CommandFailed


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


def _claude(to: Endpoint, folder: Path) -> Launch:
    content = _content("claude", to)
    # Claude Code applies the `env` of its settings over its environment, so variables alone would lose to the file
    # that `mlxctl connect claude --write` makes. Settings of the command line precede that file.
    settings = folder / "settings.json"
    settings.write_text(json.dumps(content))
    others = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
    return Launch("claude", ("--settings", str(settings)), content["env"], others)


def _codex(to: Endpoint, _: Path) -> Launch:
    flags = [
        word
        for name, value in _leaves(_content("codex", to))
        for word in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
    ]
    return Launch("codex", tuple(flags), {"MLXD_KEY": to.key} if to.key else {})


def _opencode(to: Endpoint, _: Path) -> Launch:
    return Launch("opencode", (), {"OPENCODE_CONFIG_CONTENT": json.dumps(_content("opencode", to))})


def _aider(to: Endpoint, _: Path) -> Launch:
    options = _content("aider", to)
    return Launch("aider", (), {f"AIDER_{name.upper().replace('-', '_')}": value for name, value in options.items()})


def _pi(to: Endpoint, folder: Path) -> Launch:
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


def _continue(to: Endpoint, folder: Path) -> Launch:
    file = folder / "config.yaml"
    file.write_text(setup("continue", to).edits[0].fragment(), encoding="utf-8")
    return Launch("cn", ("--config", str(file)), {})


def _qwen(to: Endpoint, _: Path) -> Launch:
    return Launch("qwen", ("--auth-type", "openai", "--model", to.model), _content("qwen", to))


def _goose(to: Endpoint, _: Path) -> Launch:
    env = {name: str(value) for name, value in _content("goose", to).items()} | {"OPENAI_API_KEY": to.some_key}
    return Launch("goose", (), env, default=("session",))


def _zed(to: Endpoint, folder: Path) -> Launch:
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
    "claude": ("claude", _claude),
    "codex": ("codex", _codex),
    "opencode": ("opencode", _opencode),
    "aider": ("aider", _aider),
    "pi": ("pi", _pi),
    "qwen": ("qwen", _qwen),
    "goose": ("goose", _goose),
    "continue": ("cn", _continue),
    "zed": ("zed", _zed),
}
