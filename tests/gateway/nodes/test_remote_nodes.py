"""Nodes of this gateway's groups: compared before a load, waited for, and left with nothing that is unused."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from gateway.config.remote_settings import FabricConfig, NodeConfig, RemoteNodeConfig
from gateway.config.settings import Config, ServerConfig
from gateway.nodes import remote_nodes
from gateway.nodes.agent_client import ANSWER_S
from gateway.nodes.networks import Interface
from gateway.nodes.node_keys import forget_public, keep_public, own_pair
from gateway.nodes.remote_nodes import RemoteNodes
from gateway.nodes.remote_rank import RemoteRank
from gateway.nodes.this_host import ThisHost
from gateway.workers.memory.estimate import Need, parts_of, portion
from gateway.workers.supervisor.ranks import RankPlace
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.curve import KeyPair
from protocol.failures import Code
from protocol.spec import GroupSpec
from tests.gateway.nodes.hosts import (
    DEADLINE_S,
    MIB,
    SHORT_S,
    SILENCE_S,
    Host,
    host,
    rank_of,
    rank_spec,
)
from tests.support.pool import short_home, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
NEED = Need(400 * MIB, 600 * MIB, 600 * MIB, 800 * MIB)
SPEC = rank_spec(path="demo", rank=None)
REMOTE = portion(NEED, 0.5, 1).floor


@dataclass(slots=True)
class Near:
    """The gateway of a group, with a home of its own."""

    home: Path
    own: KeyPair
    config: Config
    nodes: RemoteNodes
    withdrawn: int = 0

    async def admit(self) -> int:
        # An agent that says nothing is given up after `ANSWER_S`.
        return await asyncio.wait_for(
            self.nodes.admit(SPEC, self._admit, self._withdraw), ANSWER_S + patient(DEADLINE_S)
        )

    async def _admit(self) -> int:
        return 5 * MIB

    def _withdraw(self) -> None:
        self.withdrawn += 1


@asynccontextmanager
async def office(silence_s: float = SILENCE_S, **node: object) -> AsyncGenerator[tuple[Near, Host]]:
    async with AsyncExitStack() as stack:
        near_home, far_home = (stack.enter_context(short_home()) for _ in range(2))
        far = await stack.enter_async_context(host(far_home, "studio2", silence_s=silence_s))
        own = own_pair(near_home)
        far.known[own.public] = "studio1"
        key = str(keep_public(near_home, "studio2", far.keys.public))
        remote = RemoteNodeConfig(name="studio2", address=far.agent.endpoint, key=key)
        config = Config(
            home=near_home,
            server=ServerConfig(node="studio1"),
            models={},
            config_path=near_home / "mlxd.toml",
            node=msgspec.convert(node, NodeConfig),
            nodes={"studio2": remote},
        )
        near = Near(near_home, own, config, RemoteNodes(lambda: config, lambda _: NEED, reunion_s=0.2))
        try:
            yield near, far
        finally:
            await near.nodes.close()


async def test_a_group_has_its_part_of_the_memory_there_and_gives_it_back_when_it_does_not_start() -> None:
    async with office() as (near, far):
        assert await near.admit() == 5 * MIB
        assert far.held == REMOTE
        near.nodes.entered(SPEC.name, State.STARTING)
        assert far.held == REMOTE

        near.nodes.entered(SPEC.name, State.STOPPED)

        await until(lambda: far.held == 0)


async def test_a_rank_starts_in_the_memory_of_its_group_and_only_once() -> None:
    async with office() as (near, far):
        await near.admit()
        starter = near.nodes.starters["studio2"]
        rank = starter.start(rank_spec(rank=rank_of()))
        assert isinstance(rank, RemoteRank)
        await until(lambda: rank.pid != 0)
        with pytest.raises(FileNotFoundError, match="no memory at node studio2"):
            starter.start(rank_spec(rank=rank_of()))
        # A group that ends leaves what a process has to that process.
        near.nodes.entered(SPEC.name, State.BACKOFF)
        assert far.held == REMOTE
        rank.close()
        await until(lambda: far.held == 0)


async def test_other_versions_are_named_before_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with office() as (near, far):
        honest = ThisHost.describe

        def older(self: ThisHost, call: int, form: str) -> object:
            said = honest(self, call, form)
            return msgspec.structs.replace(said, versions=msgspec.structs.replace(said.versions, mlx="0.1.0"))

        monkeypatch.setattr(ThisHost, "describe", older)
        with pytest.raises(ModelUnavailable, match=r"studio2 has .*0\.1\.0") as caught:
            await near.admit()
        assert caught.value.failure.code is Code.INCOMPATIBLE
        assert far.held == 0


async def test_a_node_that_stays_away_is_named_after_a_while() -> None:
    async with office() as (near, far):
        await far.stop_agent()
        with pytest.raises(ModelUnavailable, match="studio2") as caught:
            await near.admit()
        assert caught.value.failure.is_retryable
        assert near.withdrawn == 0


async def test_a_node_whose_name_is_not_known_now_is_named_and_worth_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(host: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with office() as (near, far):
        monkeypatch.setattr(socket, "gethostbyname", unknown)
        with pytest.raises(ModelUnavailable, match=r"node studio2 .* cannot be found: .*not known") as caught:
            await near.admit()
        assert caught.value.failure.is_retryable
        assert far.held == 0


async def test_a_key_that_cannot_be_read_is_named() -> None:
    async with office() as (near, _):
        forget_public(near.home, "studio2")
        with pytest.raises(ModelUnavailable, match=r"node studio2: .*No such file") as caught:
            await near.admit()
        assert caught.value.failure.code is Code.BAD_CONFIG


async def test_a_node_that_does_not_answer_yet_is_waited_for() -> None:
    async with office() as (near, far):
        near.nodes = RemoteNodes(lambda: near.config, lambda _: NEED, reunion_s=patient(DEADLINE_S))
        far.known.clear()  # it drops what we say, as one that starts would
        waiting = asyncio.create_task(near.admit())
        await until(lambda: near.own.public in far.agent.refused_keys)

        far.known[near.own.public] = "studio1"

        await waiting
        assert far.held == REMOTE
        await near.nodes.close()


async def test_a_node_that_leaves_the_configuration_is_left() -> None:
    async with office(SHORT_S) as (near, far):
        await near.admit()
        near.config = msgspec.structs.replace(near.config, nodes={})
        near.nodes.apply(near.config)
        assert dict(near.nodes.starters) == {}
        await until(lambda: far.held == 0)


async def test_a_group_over_an_open_network_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_nodes, "interfaces", lambda: [Interface("en0", "192.168.1.20", "255.255.255.0")])
    async with office(fabric={"ips": ["192.168.1.20"]}) as (near, far):
        with pytest.raises(ModelUnavailable, match="allow_plain_lan = true") as caught:
            await near.admit()
        assert caught.value.failure.code is Code.BAD_CONFIG
        assert far.held == 0
    async with office(fabric={"ips": ["192.168.1.20"]}, allow_plain_lan=True) as (near, far):
        await near.admit()
        assert far.held == REMOTE


def test_places_have_the_addresses_and_devices_of_each_node_by_rank(tmp_path: Path) -> None:
    rdma = {"studio2": "rdma_en5", "studio3": "rdma_en4"}
    config = Config(
        home=tmp_path,
        server=ServerConfig(),
        models={},
        config_path=tmp_path / "mlxd.toml",
        node=msgspec.convert({"fabric": {"ips": ["192.168.0.1"], "rdma": rdma}}, NodeConfig),
        nodes={
            "studio2": RemoteNodeConfig(
                name="studio2",
                address="127.0.0.2:1",
                key="k",
                fabric=FabricConfig(("192.168.0.2",), {"local": "rdma_en5", "studio3": ("rdma_en2", "rdma_en3")}),
            ),
            "studio3": RemoteNodeConfig(name="studio3", address="127.0.0.3:1", key="k"),
        },
    )
    nodes = RemoteNodes(lambda: config, lambda _: NEED)
    order = ("local", "studio3", "studio2")
    places = [nodes.starters[name].place(order) for name in order]
    assert places[0] == RankPlace("127.0.0.1", "192.168.0.1", ("", "rdma_en4", "rdma_en5"))
    assert places[1] == RankPlace("127.0.0.1", "127.0.0.3", ("", "", ""))
    assert places[2] == RankPlace("127.0.0.1", "192.168.0.2", ("rdma_en5", "rdma_en2,rdma_en3", ""))


def test_parts_follow_the_split_and_each_process_has_its_own_overhead() -> None:
    assert parts_of(4, ()) == [0.25] * 4
    assert parts_of(2, (30, 10)) == [0.75, 0.25]
    whole = portion(NEED, 1.0, 1)
    assert whole == NEED
    halves = [portion(NEED, 0.5, 1).floor, portion(NEED, 0.5, 1).floor]
    assert NEED.floor < sum(halves) < 2 * NEED.floor
    assert portion(NEED, 1.0, 2).floor == sum(halves)
    assert GroupSpec(("local", "studio2"), "pipeline", "ring").size == 2
