"""Gateways that are peers of each other, with scripted workers; what a test needs to have two."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.access.key import Key
from gateway.access.key_file import KeyFile
from gateway.config.remote_settings import PeerConfig
from gateway.config.settings import ModelConfig
from gateway.state_dir.home_paths import keys_path
from tests.gateway.harness import Gateway, running, until

# Where nothing listens.
NOWHERE = "http://127.0.0.1:9"


def key_for(home: Path, name: str = "door", **fields: Any) -> Path:
    """A key of role peer, made in a home, in a file of its own."""
    _, secret = KeyFile(keys_path(home)).create(Key(name=name, prefix="", salt="", hash="", is_peer=True, **fields))
    file = home / f"{name}.key"
    file.write_text(secret + "\n")
    return file


def peer(gateway: Gateway, key_file: Path, name: str = "b") -> PeerConfig:
    return PeerConfig(name=name, url=gateway.url, key_file=str(key_file))


@asynccontextmanager
async def door(
    home: Path, *peers: PeerConfig, models: Sequence[ModelConfig] = (), options: Sequence[str] = ()
) -> AsyncGenerator[Gateway]:
    """A gateway that has heard of all of its peers; its own model is `own`, unless others are given."""
    own = models or [ModelConfig(name="own", path="own")]
    async with running(home, options, own, peers=peers) as gateway:
        nodes = gateway.app.services.fleet.nodes.values()
        await until(lambda: all(node.problem != "not heard of yet" for node in nodes))
        yield gateway
