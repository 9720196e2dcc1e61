"""Limit of the prefix cache on disk, applied when the daemon starts or the limit changes."""

import asyncio
import logging

from gateway.config.settings import Config
from gateway.model_files import prefix_files

log = logging.getLogger(__name__)


async def limit_prefixes(config: Config) -> None:
    """Delete prefixes beyond the limit of `config`; all of them if no model has a prefix cache on disk.

    A configuration without models has no limit.
    """
    if not config.models:
        return
    root, limit_bytes = config.prefix_cache_dir, config.prefix_cache_bytes
    try:
        deleted = await asyncio.to_thread(prefix_files.limit, root, limit_bytes)
    except OSError as error:
        log.warning("prefix cache: the limit of %d bytes could not be applied: %s", limit_bytes, error)
        return
    if deleted.files:
        size_bytes = deleted.size_bytes
        log.info("prefix cache: deleted %d files (%d bytes) beyond its limit", deleted.files, size_bytes)
