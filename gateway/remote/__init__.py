"""Other machines: peers, which are other mlxd daemons, and upstreams, which are any OpenAI-compatible server."""
