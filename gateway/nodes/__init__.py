"""Nodes: the agent that runs ranks of other gateways' groups here, and the agents that run ranks of ours elsewhere."""

__all__ = ["agent_client", "local_agent", "networks", "node_keys", "remote_nodes", "this_host"]
