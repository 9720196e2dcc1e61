"""Other machines: upstreams, which are any OpenAI-compatible server."""
