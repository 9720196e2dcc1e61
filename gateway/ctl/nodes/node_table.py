"""`[nodes.NAME]` in this home's configuration file: written and removed, with the key that it names."""

from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit.exceptions import TOMLKitError

from gateway.client_setup.config_write import WrittenFile, rewrite
from gateway.config.load import bad_name
from gateway.config.node_tables import LOCAL, bad_address
from gateway.config.settings import CONFIG_NAME
from gateway.ctl.model_verbs.offline import read_config
from gateway.failed import CommandFailed
from gateway.nodes.node_keys import forget_public, keep_public


def add(home: Path, name: str, address: str, public: str) -> WrittenFile:
    """Keep a node's key and write its table; other content of the file stays. Raises `CommandFailed`."""
    reason = "is this machine" if name == LOCAL else "must not contain '/'" if "/" in name else bad_name(name)
    if reason:
        raise CommandFailed(f"node name {name!r} {reason}")
    if address and (reason := bad_address(address)):
        raise CommandFailed(f"address {address!r} {reason}")
    read_config()  # a file that is broken already is not this change's fault
    key = keep_public(home, name, public)
    table = {"address": address, "key": str(key.relative_to(home))} if address else {"key": str(key.relative_to(home))}
    written = rewrite(home / CONFIG_NAME, lambda text: _with(text, name, table))
    read_config()
    return written


def remove(home: Path, name: str) -> WrittenFile:
    """Remove a node's table and its key. Raises `CommandFailed`."""
    if name not in read_config().nodes:
        raise CommandFailed(f"there is no node {name!r}; see mlxctl node list")
    written = rewrite(home / CONFIG_NAME, lambda text: _without(text, name))
    forget_public(home, name)
    return written


def _with(text: str, name: str, table: dict[str, str]) -> str:
    document = _parsed(text)
    nodes = document.setdefault("nodes", tomlkit.table(is_super_table=True))
    own = nodes.get(name)
    if own is None:
        own = nodes[name] = tomlkit.table()
        own = nodes[name]
    for key, value in table.items():
        own[key] = value
    return tomlkit.dumps(cast(Any, document))


def _without(text: str, name: str) -> str:
    document = _parsed(text)
    del document["nodes"][name]
    if not document["nodes"]:
        del document["nodes"]
    return tomlkit.dumps(cast(Any, document))


def _parsed(text: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], tomlkit.parse(text))
    except TOMLKitError as error:
        raise CommandFailed(f"{CONFIG_NAME} is no valid TOML ({error})") from None
