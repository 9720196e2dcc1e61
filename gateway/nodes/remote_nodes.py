"""Nodes that ranks of this gateway's groups run on: connections to their agents, grants over hosts, and starts."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config.node_tables import LOCAL
from gateway.config.remote_settings import RemoteNodeConfig
from gateway.config.settings import Config
from gateway.model_files.served_form import FormReader
from gateway.nodes.agent_client import AgentClient, NodeLost, NodeRefused
from gateway.nodes.group_grants import Grants, GroupGrants, RankNeed, Wanted
from gateway.nodes.networks import device, interfaces, objection
from gateway.nodes.node_keys import NodeKeyUnusable, own_pair, public_of
from gateway.nodes.remote_rank import RemoteRank
from gateway.nodes.this_host import group_name, versions
from gateway.workers.memory.estimate import Need, parts_of, portion
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.ranks import RankPlace, RankStarter
from gateway.workers.supervisor.state import SHUTTING_DOWN, ModelUnavailable, State
from protocol.curve import KeyPair
from protocol.failures import Code, Failure
from protocol.node_agent import Describe, Described
from protocol.spec import GroupSpec, WorkerSpec

log = logging.getLogger(__name__)

# A node that does not answer, or has just lost what it had for us, may be starting again: a group waits so long for it.
REUNION_S: Final = 30.0
RETRY_S: Final = 0.5
_GONE: Final = frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE})
# A port that nothing has to listen on: it only chooses the route.
_DISCARD: Final = 9


class RemoteNodes:
    """Owns the clients of agents, and what is reserved there for groups of this gateway. All on one loop."""

    def __init__(
        self, config: Callable[[], Config], need_of: Callable[[str], Need], *, reunion_s: float = REUNION_S
    ) -> None:
        """`need_of` is the memory of a model in one process; it reads files."""
        self._reunion_s = reunion_s
        self._config = config
        self._need_of = need_of
        self._forms = FormReader()
        self._own: KeyPair | None = None
        self._clients: dict[str, tuple[RemoteNodeConfig, AgentClient]] = {}
        # By model; taken over by the processes of its ranks.
        self._granted: dict[str, Grants] = {}
        # IPv4 addresses by host.
        self._ips: dict[str, str] = {}
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        # Of every node and this one, as the configuration in force has them.
        self.starters: dict[str, RankStarter] = {}
        self.apply(config())

    # -- configuration -----------------------------------------------------------------------------------------------

    def apply(self, config: Config) -> None:
        """Put a configuration into force. Ranks at a node that was changed or removed end."""
        for name, (node, client) in list(self._clients.items()):
            if config.nodes.get(name) != node:
                del self._clients[name]
                self._start(client.close())
        self.starters.clear()
        if config.nodes:
            self.starters[LOCAL] = _Here(self)
            self.starters.update({name: _Elsewhere(self, name) for name in config.nodes})

    async def close(self) -> None:
        """End all connections, and make no more. What runs elsewhere ends by our silence."""
        self._is_closed = True
        for _, client in self._clients.values():
            await client.close()
        self._clients.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def client(self, name: str) -> AgentClient:
        """The connection to a node, begun if there is none. Raises `ModelUnavailable`."""
        known = self._clients.get(name)
        if known is None:
            known = self._clients[name] = self._connected(name)
        return known[1]

    def _connected(self, name: str) -> tuple[RemoteNodeConfig, AgentClient]:
        if self._is_closed:
            raise ModelUnavailable(SHUTTING_DOWN)
        config = self._config()
        node = config.nodes.get(name)
        if node is None or not node.address:
            why = "has no address in the configuration" if node is not None else "is not in the configuration"
            raise ModelUnavailable(Failure(Code.BAD_CONFIG, f"node {name} {why}"))
        try:
            if self._own is None:
                self._own = own_pair(config.home)
            client = AgentClient(name, node.address, public_of(node.key), self._own)
        except NodeKeyUnusable as error:
            raise ModelUnavailable(Failure(Code.BAD_CONFIG, f"node {name}: {error}")) from None
        client.open()
        return node, client

    def _start(self, closing: Awaitable[None]) -> None:
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- memory ------------------------------------------------------------------------------------------------------

    async def admit(self, spec: WorkerSpec, admit: Callable[[], Awaitable[int]], withdraw: Callable[[], None]) -> int:
        """Wait for memory on every host of a group; returns this host's share. May be cancelled.

        Versions and forms are compared first. Raises `ModelUnavailable`, which names the host.
        """
        self._release(spec.name)
        end = asyncio.get_running_loop().time() + self._reunion_s
        while True:
            try:
                grants = await self._acquire(spec, admit, withdraw)
            except ModelUnavailable as error:
                is_over = self._is_closed or not error.failure.is_retryable
                if is_over or asyncio.get_running_loop().time() >= end:
                    raise
                log.info("%s waits: %s", spec.name, error)
                await asyncio.sleep(RETRY_S)
            else:
                self._granted[spec.name] = grants
                return grants.share_bytes

    async def _acquire(
        self, spec: WorkerSpec, admit: Callable[[], Awaitable[int]], withdraw: Callable[[], None]
    ) -> Grants:
        group = spec.group
        assert group is not None, "only groups have other hosts"
        await asyncio.to_thread(self._find_nodes, group)
        await self._check_networks(group)
        need = await asyncio.to_thread(self._need_of, spec.name)
        form = await asyncio.to_thread(self._forms.read, spec.path, ())
        if not form:
            raise ModelUnavailable(
                Failure(Code.MODEL_MISSING, f"model '{spec.name}': {spec.path} is not on this machine")
            )
        parts = parts_of(group.size, group.split)
        remote = [rank for rank, node in enumerate(group.nodes) if node != LOCAL]
        needs = [RankNeed(self.client(group.nodes[rank]), rank, portion(need, parts[rank], 1).floor) for rank in remote]
        await asyncio.gather(*(self._check_versions(each.client) for each in needs))
        wanted = Wanted(group_name(spec), spec.path, form, group.size, needs)
        assert self._own is not None, "made with the first client"
        return await GroupGrants(self._own.public).acquire(wanted, admit, withdraw)

    def entered(self, model: str, state: State) -> None:
        """A worker is in another state: without a process, nothing is kept for one."""
        if state in _GONE:
            self._release(model)

    def _release(self, model: str) -> None:
        if (grants := self._granted.pop(model, None)) is not None:
            grants.release()

    async def _check_versions(self, client: AgentClient) -> None:
        try:
            said = await client.ask(lambda call: Describe(call), Described)
        except (NodeLost, NodeRefused) as error:
            raise ModelUnavailable(Failure(Code.BUSY, str(error)), 1.0) from None
        if said.versions != (own := versions()):
            why = f"node {client.name} has {said.versions}, and this machine {own}: install the same"
            raise ModelUnavailable(Failure(Code.INCOMPATIBLE, why))

    def _find_nodes(self, group: GroupSpec) -> None:
        """Look up the addresses of a group's nodes, which may take long. Raises `ModelUnavailable`."""
        nodes = self._config().nodes
        for name in dict.fromkeys(group.nodes):
            if name not in nodes or not nodes[name].address:
                continue
            host = _host(nodes[name].address)
            try:
                self._ips[host] = socket.gethostbyname(host)
                _towards(self._ips[host])
            except (OSError, UnicodeError) as error:
                why = f"node {name} ({host}) cannot be found: {error}"
                raise ModelUnavailable(Failure(Code.BUSY, why), 1.0) from None

    async def _check_networks(self, group: GroupSpec) -> None:
        ip = self.place(LOCAL, group.nodes).ip
        if problem := objection(ip, self._config().node, await asyncio.to_thread(interfaces)):
            raise ModelUnavailable(Failure(Code.BAD_CONFIG, f"[node] fabric: {problem}"))

    # -- starts ------------------------------------------------------------------------------------------------------

    def place(self, name: str, nodes: Sequence[str]) -> RankPlace:
        """The place of a node in a group over `nodes`."""
        config = self._config()
        if name == LOCAL:
            other = next((node for node in nodes if node != LOCAL), LOCAL)
            towards = _towards(self._ip(config.nodes[other].address)) if other in config.nodes else "127.0.0.1"
            fabric = config.node.fabric
            ip = fabric.ips[0] if fabric.ips else towards
            return RankPlace(towards, ip, tuple(device(fabric, node) for node in nodes))
        node = config.nodes[name]
        own = self._ip(node.address)
        ip = node.fabric.ips[0] if node.fabric.ips else own
        return RankPlace(_towards(own), ip, tuple(device(node.fabric, each) for each in nodes))

    def _ip(self, address: str) -> str:
        """The IPv4 address of a node, as it was when memory was asked for. Raises `OSError`."""
        host = _host(address)
        return self._ips.get(host) or socket.gethostbyname(host)

    def start(self, name: str, spec: WorkerSpec) -> WorkerPort:
        """Start a rank in what was granted for it. Raises `OSError`."""
        assert spec.rank is not None, "a rank's specification"
        grants = self._granted.get(spec.name)
        reserved = grants.reservations.pop(spec.rank.rank, None) if grants is not None else None
        if reserved is None:
            raise FileNotFoundError(f"there is no memory at node {name} for rank {spec.rank.rank} of {spec.name}")
        return RemoteRank(*reserved, spec)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Starts ranks at one node."""

    nodes: RemoteNodes
    name: str

    def place(self, nodes: Sequence[str]) -> RankPlace:
        return self.nodes.place(self.name, nodes)

    def start(self, spec: WorkerSpec) -> WorkerPort:
        return self.nodes.start(self.name, spec)


@dataclass(frozen=True, slots=True)
class _Here:
    """This machine's place in groups with ranks elsewhere; its own ranks are the spawner's."""

    nodes: RemoteNodes

    def place(self, nodes: Sequence[str]) -> RankPlace:
        return self.nodes.place(LOCAL, nodes)

    def start(self, spec: WorkerSpec) -> WorkerPort:
        raise AssertionError("the spawner starts what runs here")


def _towards(ip: str) -> str:
    """The address of this machine by which it reaches another one. Raises `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: it only chooses a route.
        probe.connect((ip, _DISCARD))
        return probe.getsockname()[0]


def _host(address: str) -> str:
    return address.rpartition(":")[0]
