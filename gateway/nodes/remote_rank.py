"""Rank of a group at another node, as a process of this gateway: started by its agent, ended by orders to it."""

import asyncio
import logging
import signal
from typing import Final

import msgspec

from gateway.nodes.agent_client import AgentClient, NodeLost, NodeRefused, RankEnd
from protocol.node_agent import Release, Signal, Spawn, Spawned
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

SPAWN_S: Final = 15.0
# From SIGKILL until its end is told. An order can be lost: then it is given up, and what runs there is released.
KILL_S: Final = 10.0
# The status of a rank that could not be started; nobody but its agent knows more.
NOT_STARTED: Final = 255


class RemoteRank:
    """`Process` of a rank whose memory is committed as `reservation`. A start that fails is an exit with its reason."""

    is_adopted: bool = False

    def __init__(self, client: AgentClient, reservation: int, spec: WorkerSpec, *, kill_s: float = KILL_S) -> None:
        self._kill_s = kill_s
        self._client = client
        self._reservation = reservation
        self._end: asyncio.Future[RankEnd] = asyncio.get_running_loop().create_future()
        self._pid = 0
        self._signals: list[int] = []
        client.expect_end(reservation, self._ended)
        self._start = asyncio.create_task(self._spawn(spec), name=f"rank of {spec.name} at {client.name}")

    @property
    def pid(self) -> int:
        """Of a process of its own machine; 0 until it has one."""
        return self._pid

    async def wait(self) -> int | None:
        return (await asyncio.shield(self._end)).status

    def signal(self, signum: int) -> None:
        if self._end.done():
            return
        if signum == signal.SIGKILL:
            asyncio.get_running_loop().call_later(self._kill_s, self._give_up)
        if self._pid:
            self._client.tell(Signal(0, self._reservation, signum))
        else:
            self._signals.append(signum)

    def last_lines(self) -> list[str]:
        return self._end.result().lines if self._end.done() else []

    def close(self) -> None:
        """Give the memory back; what still runs is ended by its agent."""
        self._start.cancel()
        self._client.tell(Release(0, self._reservation))
        self._client.forget(self._reservation)
        self._ended(RankEnd(None, []))

    async def _spawn(self, spec: WorkerSpec) -> None:
        # Paths and sockets of this machine are nothing to another.
        sent = msgspec.structs.replace(spec, path="", down="", up="", disk_cache_dir="", chat_template="")
        body = msgspec.json.encode(sent)
        try:
            spawned = await self._client.ask(lambda call: Spawn(call, self._reservation, body), Spawned, SPAWN_S)
        except NodeLost as error:
            self._ended(RankEnd(None, [str(error)]))
        except NodeRefused as error:
            self._ended(RankEnd(NOT_STARTED, [f"node {self._client.name}: {error}"]))
        else:
            self._pid = spawned.pid
            for signum in self._signals:
                self.signal(signum)

    def _give_up(self) -> None:
        if not self._end.done():
            self._client.forget(self._reservation)
            self._ended(RankEnd(None, [f"node {self._client.name} did not say in time that it was killed"]))

    def _ended(self, end: RankEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)
