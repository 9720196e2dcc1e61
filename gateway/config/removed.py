"""Keys and tables that the configuration file had in earlier versions, each with what holds instead."""

from typing import Final

_NO_AGENTS: Final = (
    "ranks on other machines are started over ssh, and there are no agents and no keys of nodes any more: take it out, "
    "and name a host file; see docs/groups.md"
)
# Spelled as in the file. NAME stands for a name that the file's author chooses.
REMOVED: Final = {
    "node": _NO_AGENTS,
    "nodes": _NO_AGENTS,
    "peers": "a daemon serves the models of its own machine: put a router in front of the daemons; see docs/fleet.md",
    "server.log_format": "stderr gets text if it is a terminal, and JSON otherwise",
    "server.log_max": "a log file has at most 16 MiB",
    "server.log_keep": "8 older log files are kept",
    "server.usage_months": "usage is kept for 13 months",
    "server.queue_share": (
        "while there are other keys, a key may fill half of a model's queue; "
        "mlxctl keys set NAME --queue-share changes this for one key"
    ),
    "server.response_store_age": "a stored response that is not used for 30 days is deleted",
    "server.unauthorized_rpm": "an address may send 300 requests without a valid key a minute",
    "server.max_connections_per_address": (
        "one address may have half of max_connections; those in trusted_proxies may have all"
    ),
    "server.capture_max": "captured requests take at most 64 MiB of the disk",
    "server.capture_age": "a captured request is deleted after one day",
    "media.max_pixels": "an image has at most 64,000,000 pixels",
    "media.in_flight": "the media of all requests together have at most 512 MiB",
    "media.fetch_timeout": "the URLs of a request are fetched within 10 seconds",
    "audio.max_input": "a text to speak has at most 4,096 characters",
    "audio.max_speech": "the speech of one request lasts at most 15 minutes",
    "batches.age": "files and ended batches are deleted after 30 days; a file may have an expires_after of its own",
    "models.NAME.cache.disk_min_tokens": "prefixes of fewer than 512 tokens are not written to the disk",
}
# Tables whose tables have names that the file's author chooses.
_NAMED: Final = ("models", "upstreams")


def what_holds_now(where: tuple[str, ...]) -> str:
    """Return what holds instead of a removed key or table at this place of the file; empty if none was there."""
    if len(where) > 1 and where[0] in _NAMED:
        where = (where[0], "NAME", *where[2:])
    path = ".".join(where)
    # A key may be spelled with its unit.
    return REMOVED.get(path) or REMOVED.get(path.removesuffix("_s")) or REMOVED.get(path.removesuffix("_bytes"), "")
