"""Nodes: the agent that runs ranks of other gateways' groups here, and the agents that run ranks of ours elsewhere."""
