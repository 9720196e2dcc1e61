"""Keys of nodes in a home: this node's own pair, made when it is first needed, and the public keys of others."""

import os
import re
from pathlib import Path
from typing import Final

from gateway.config.node_tables import read_public
from gateway.failed import CommandFailed
from gateway.state_dir.folder import FolderRefused, HomeFolder
from gateway.state_dir.home_paths import node_key_path
from gateway.state_dir.private_file import write_private_in
from protocol.curve import KeyPair, is_key, make_pair, pair_of

_PUBLIC_SUFFIX: Final = ".public"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class NodeKeyUnusable(CommandFailed):
    """The key cannot be read or made."""


def own_pair(home: Path) -> KeyPair:
    """This node's pair, made if there is none: a file of mode 0600. Raises `NodeKeyUnusable`."""
    path = node_key_path(home)
    folder = HomeFolder(path.parent)
    try:
        with folder.changing() as opened:
            try:
                mode, text = folder.read(opened, path.name)
            except FileNotFoundError:
                pair = make_pair()
                write_private_in(opened, path.name, f"{pair.secret}\n".encode())
                return pair
        if mode & 0o077:
            raise NodeKeyUnusable(f"{path} can be read by others: chmod 600 it, or delete it and exchange keys again")
        return pair_of(text.decode("ascii").strip())
    except ValueError:
        raise NodeKeyUnusable(f"{path} holds no key; delete it, and exchange keys with the other nodes again") from None
    except (OSError, FolderRefused) as error:
        raise NodeKeyUnusable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def keep_public(home: Path, name: str, public: str) -> Path:
    """Write the public key of another node. Returns its file. Raises `NodeKeyUnusable`."""
    path = public_path(home, name)
    if not is_key(public):
        raise NodeKeyUnusable(f"{public!r} is no public key: 64 hexadecimal digits are expected")
    folder = HomeFolder(path.parent)
    try:
        with folder.changing() as opened:
            write_private_in(opened, path.name, f"{public}\n".encode())
    except (OSError, FolderRefused) as error:
        raise NodeKeyUnusable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None
    return path


def forget_public(home: Path, name: str) -> None:
    """Remove the file of a node's public key, if it is there. Raises `NodeKeyUnusable`."""
    path = public_path(home, name)
    folder = HomeFolder(path.parent)
    try:
        with folder.changing() as opened:
            os.unlink(path.name, dir_fd=opened)
    except FileNotFoundError:
        pass
    except (OSError, FolderRefused) as error:
        raise NodeKeyUnusable(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None


def public_path(home: Path, name: str) -> Path:
    return home / "keys" / (_UNSAFE.sub("-", name) + _PUBLIC_SUFFIX)


def public_of(path: str) -> str:
    """The public key that `[nodes.NAME]` names. Raises `NodeKeyUnusable`."""
    try:
        return read_public(Path(path))
    except (OSError, ValueError) as error:
        raise NodeKeyUnusable(f"{path}: {error}") from None
