"""Nodes that are known here: names and public keys of those in `[nodes]`, as of the configuration in force."""

import logging
from collections.abc import Callable, Mapping

from gateway.config.remote_settings import RemoteNodeConfig
from gateway.config.settings import Config
from gateway.nodes.node_keys import NodeKeyUnusable, public_of

log = logging.getLogger(__name__)


class KnownNodes:
    """Names by public key. The files are read once for each configuration."""

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._read: dict[str, RemoteNodeConfig] | None = None
        self._names: dict[str, str] = {}

    def names(self) -> Mapping[str, str]:
        nodes = self._config().nodes
        if nodes is not self._read:
            self._read = nodes
            self._names = {public: name for name, node in nodes.items() if (public := _public(node))}
        return self._names


def _public(node: RemoteNodeConfig) -> str:
    try:
        return public_of(node.key)
    except NodeKeyUnusable as error:
        # It was there when the configuration was checked.
        log.error("node %s is not admitted: %s", node.name, error)
        return ""
