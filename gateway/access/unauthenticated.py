"""Requests without a valid key, by their client's address. Failed attempts are rate-limited and only some are logged,
so that neither memory nor the log grows with them.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.access.rate_limit import TokenBucket
from gateway.config.address import Address
from gateway.errors import RateLimited

log = logging.getLogger(__name__)

# Requests without a valid key that one address may send in a minute.
FAILURES_PER_MINUTE: Final = 300
# Maximum number of addresses with a bucket. A new address replaces the one that failed longest ago.
ADDRESSES_MAX: Final = 4096
PERIOD_S: Final = 60.0
# Limits of one period: lines per address, lines in total, and addresses that are counted separately.
LINES_BY_ADDRESS: Final = 3
LINES_IN_ALL: Final = 60
COUNTED_ADDRESSES_MAX: Final = 1024
# Number of addresses whose counts are logged separately at the end of a period.
LOGGED_ADDRESSES_MAX: Final = 20


class Throttle:
    """Rate limit of failed attempts per address. Requests with a valid key are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, per_minute: int = FAILURES_PER_MINUTE) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def fail(self, address: Address) -> None:
        """Count one failed attempt. Raises `RateLimited` beyond `per_minute` attempts of one address."""
        if not address.host:
            return
        now = self._clock()
        bucket = self._bucket(address.network, now)
        if (wait_s := bucket.wait_s(1, now)) > 0:
            message = "Too many requests without a valid API key come from this address."
            raise RateLimited(message, "requests", wait_s)
        bucket.take(1, now)

    def _bucket(self, network: str, now: float) -> TokenBucket:
        bucket = self._buckets.get(network)
        if bucket is None or bucket.capacity != self.per_minute:
            bucket = self._buckets[network] = TokenBucket(self.per_minute, now)
        self._buckets.move_to_end(network)
        if len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)
        return bucket


class LogSample:
    """Selects requests to log: a few per minute and address. The others are only counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seen: dict[str, int] = {}
        self._shown = 0
        self._more: dict[str, int] = {}
        # Requests of addresses that are not counted separately.
        self._others = 0

    def takes(self, address: Address) -> bool:
        """Return whether to log this request. A request that is not logged is counted."""
        if self._clock() - self._began >= PERIOD_S:
            self.log_counts()
        network = address.network
        seen = self._seen.get(network)
        if seen is None and len(self._seen) >= COUNTED_ADDRESSES_MAX:
            self._others += 1
            return False
        self._seen[network] = (seen or 0) + 1
        if (seen or 0) < LINES_BY_ADDRESS and self._shown < LINES_IN_ALL:
            self._shown += 1
            return True
        self._more[network] = self._more.get(network, 0) + 1
        return False

    def log_counts(self) -> None:
        """Log the counts, and begin the next period."""
        ranked = sorted(self._more.items(), key=lambda item: item[1], reverse=True)
        for network, count in ranked[:LOGGED_ADDRESSES_MAX]:
            fields = {"client": network, "requests": count}
            log.info("%d more unauthenticated requests from this address", count, extra={"fields": fields})
        rest = ranked[LOGGED_ADDRESSES_MAX:]
        if count := sum(count for _, count in rest) + self._others:
            fields = {"requests": count}
            log.info("%d more unauthenticated requests from other addresses", count, extra={"fields": fields})
        self._began = self._clock()
        self._seen, self._more, self._shown, self._others = {}, {}, 0, 0

    async def run(self) -> None:
        """Log counts at the end of each period, even without new requests, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.log_counts()
