"""Identity of a node as operators exchange it: its name, its public key with a fingerprint, and its agent's address."""

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.config.settings import Config
from gateway.failed import CommandFailed
from gateway.nodes.node_keys import own_pair, public_of
from protocol.curve import fingerprint, is_key

SSH_S: Final = 60.0
# `user@host`, and no option of ssh.
_TARGET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9.:_-]*)?")
# What an agent that listens on all addresses gives is none to connect to.
_EVERYWHERE: Final = ("0.0.0.0", "*")

# Runs a command, and returns what it has printed. Raises `CommandFailed`.
Run = Callable[[Sequence[str]], str]


class NodeRow(Struct, frozen=True):
    """One node. Of this machine `is_own` holds, and `address` is where its agent listens."""

    name: str
    address: str
    public: str
    fingerprint: str
    is_own: bool = False


def rows(home: Path, config: Config) -> list[NodeRow]:
    """This machine, then those of the configuration. Raises `CommandFailed`."""
    own = own_pair(home).public
    others = [(node.name, node.address, public_of(node.key)) for node in config.nodes.values()]
    return [
        NodeRow(config.server.node_name, config.node.listen, own, fingerprint(own), is_own=True),
        *(NodeRow(name, address, public, fingerprint(public)) for name, address, public in others),
    ]


def add_command(own: NodeRow) -> list[str]:
    """The command that makes this machine known at another one."""
    return ["mlxctl", "node", "add", own.name, *([own.address] if reachable(own.address) else []), "--key", own.public]


def reachable(address: str) -> str:
    """An address that others can connect to, or empty."""
    host, _, port = address.rpartition(":")
    return "" if not address or host in _EVERYWHERE or port == "0" else address


def over_ssh(target: str, command: Sequence[str], run: Run) -> str:
    """Output of a command that is run on another machine. Raises `CommandFailed`."""
    if _TARGET.fullmatch(target) is None:
        raise CommandFailed(f"{target!r} is no USER@HOST")
    # ssh hands one text to a shell there.
    return run(["ssh", "-o", "ConnectTimeout=10", "--", target, shlex.join(command)])


def ask(target: str, run: Run) -> NodeRow:
    """The identity of another machine, by its own mlxctl. Raises `CommandFailed`."""
    said = over_ssh(target, ["mlxctl", "node", "list", "--json"], run)
    try:
        known = msgspec.json.decode(said, type=list[NodeRow])
    except msgspec.DecodeError as error:
        raise CommandFailed(f"{target}: its mlxctl answers with something else: {error}") from None
    own = next((row for row in known if row.is_own and is_key(row.public)), None)
    if own is None:
        raise CommandFailed(f"{target}: its mlxctl tells no key")
    return own


def run_here(command: Sequence[str]) -> str:
    """Run a command of this machine, with its errors on our stderr. Raises `CommandFailed`."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SSH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise CommandFailed(f"{shlex.join(command)} failed with status {done.returncode}")
    return done.stdout
