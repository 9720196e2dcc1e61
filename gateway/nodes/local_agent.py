"""The agent of a daemon, if its configuration wants one."""

from collections.abc import Callable

import zmq

from gateway.config.settings import Config
from gateway.failed import CommandFailed
from gateway.nodes.agent import Agent, AgentLimits
from gateway.nodes.known_nodes import KnownNodes
from gateway.nodes.node_keys import own_pair
from gateway.nodes.this_host import ThisHost
from gateway.workers.pool.pool import Pool


class AgentUnusable(CommandFailed):
    """The agent cannot listen, or has no key."""


def make_agent(config: Callable[[], Config], pool: Pool, links: tuple[str, str]) -> Agent | None:
    """An agent that listens; None without `[node] listen`. Raises `AgentUnusable`. On the loop that it will run on."""
    address = config().node.listen
    if not address:
        return None
    try:
        own = own_pair(config().home)
        agent = Agent(
            address,
            own,
            KnownNodes(config).names,
            ThisHost(config, pool.broker, pool.start_rank, links),
            AgentLimits(),
        )
        agent.open()
    except CommandFailed as error:
        raise AgentUnusable(str(error)) from None
    except zmq.ZMQError as error:
        raise AgentUnusable(f"[node] listen: cannot listen on {address}: {error.strerror}") from None
    return agent
