"""Rate limits and budgets of a key: token buckets on a monotonic clock, and usage from the ledger.

Limits of requests count sequences (prompts times choices), since each sequence costs the worker as much as a request.

A bucket holds a minute's worth and refills evenly, so that its level and the time until it is full are exact. A request
takes its estimated tokens when it begins, and the difference to its usage when it ends. An overdrawn bucket refuses
requests until its debt is refilled, so that the mean rate holds even if every estimate is wrong.

Requests without a valid key, by their client's address. Failed attempts are rate-limited and only some are logged,
so that neither memory nor the log grows with them.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from gateway.access.key import KeyLimits
from gateway.access.ledger import Ledger
from gateway.config.address import Address
from gateway.errors import BUSY_RETRY_AFTER_S, BadRequest, BudgetSpent, RateLimited
from gateway.telemetry.metrics import KeyMetrics

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

# A sequence is expected to use this many completion tokens until a sequence of the key has ended.
EXPECTED_COMPLETION: Final = 256.0
# The largest debt of a bucket refills in this time. It is also the longest Retry-After.
DEBT_MAX_S: Final = 86400.0
# Counting a prompt's tokens charges this fraction of them to the rate limit, because it costs less than processing
# them.
COUNTING_PART: Final = 0.1
# Weight of the newest sequence in the moving average of completion tokens.
SMOOTHING: Final = 0.1


class Budget:
    """Daily and monthly budgets of a key. The ledger has the key's usage."""

    def __init__(self, name: str, limits: KeyLimits, ledger: Ledger) -> None:
        self._name = name
        self.limits = limits
        self._ledger = ledger
        # The period and the percentage that were last logged, for each budget.
        self._logged: dict[tuple[str, str], tuple[str, int]] = {}

    def check(self, running: int, sequences: int, reserved: float) -> None:
        """Raises `BudgetSpent` if a budget has no room for `sequences` more sequences, or has no token left after the
        reservations of running requests.
        """
        for period, kind, limit, spent in self._budgets():
            used = spent + (running + sequences if kind == "requests" else reserved)
            if used > limit or (kind == "tokens" and used >= limit):
                raise BudgetSpent(
                    f"Key {self._name!r} has used its {limit} {kind} of this {period}.", self._ledger.left_s(period)
                )

    def used(self) -> list[tuple[str, str, float]]:
        """Return the period, the kind and the used fraction of each budget."""
        return [(period, kind, spent / limit) for period, kind, limit, spent in self._budgets()]

    def log_use(self) -> None:
        """Log that a budget has reached its alert level, and later that it is spent, each once per period."""
        today = self._ledger.today()
        for period, kind, limit, spent in self._budgets():
            begun = today.isoformat() if period == "day" else f"{today:%Y-%m}"
            marks = sorted({self.limits.alert_at or 100, 100})
            reached = max((mark for mark in marks if 100 * spent >= mark * limit), default=0)
            if reached and self._logged.get((period, kind), ("", 0)) < (begun, reached):
                self._logged[period, kind] = (begun, reached)
                log.warning(
                    "key %s has used %d of its %d %s of this %s (%d %%)",
                    self._name, spent, limit, kind, period, 100 * spent // limit,
                )  # fmt: skip

    def _budgets(self) -> list[tuple[str, str, int, int]]:
        limits, ledger, name = self.limits, self._ledger, self._name
        configured = (
            ("day", "requests", limits.requests_per_day),
            ("day", "tokens", limits.tokens_per_day),
            ("month", "requests", limits.requests_per_month),
            ("month", "tokens", limits.tokens_per_month),
        )
        return [
            (period, kind, limit, getattr(ledger.day(name) if period == "day" else ledger.month(name), kind))
            for period, kind, limit in configured
            if limit
        ]


class TokenBucket:
    """Bucket of `per_minute` tokens that refills evenly. A level below zero is a debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._rate = per_minute / 60
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        self._level = min(float(self.capacity), self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is available. An amount above the capacity needs a full bucket."""
        return self._refill_s(min(amount, self.capacity), now)

    def take(self, amount: float, now: float) -> None:
        """Take an amount, or give back a negative one."""
        self._level = min(float(self.capacity), self.level(now) - amount)

    def charge(self, amount: float, now: float) -> None:
        """Take usage beyond a reservation. The debt is bounded, because the reported usage may be wrong."""
        self.take(amount, now)
        self._level = max(self._level, -DEBT_MAX_S * self._rate)

    def full_in_s(self, now: float) -> float:
        return self._refill_s(self.capacity, now)

    def _refill_s(self, level: float, now: float) -> float:
        return min(DEBT_MAX_S, max(0.0, level - self.level(now)) / self._rate)


@dataclass(slots=True)
class UsageCharge:
    """Tokens of one request: its reservation, and at the end its usage. Its generation owns and changes it."""

    reserved: float
    sequences: int = 1
    prompt: int = 0
    completion: int = 0


class Meter:
    """Usage of one key, checked against its limits. Used on the event loop only; no call waits."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        numbers: KeyMetrics,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self._name = name
        self._numbers = numbers
        self._clock = clock
        self._limits = limits
        self._requests = _bucket(limits.rpm, clock())
        self._tokens = _bucket(limits.tpm, clock())
        self._expected_completion = EXPECTED_COMPLETION
        # Number of requests whose body is being received.
        self._receiving = 0
        # Number of running sequences of batches, which only budgets count.
        self._batch_sequences = 0
        # Tokens that running requests are expected to use.
        self._reserved = 0.0
        self._budget = None if ledger is None else Budget(name, limits, ledger)
        if self._budget is not None:
            numbers.budget = self._budget.used

    def limit(self, limits: KeyLimits) -> None:
        """Replace the limits. What was used of an old limit counts against the new one."""
        now = self._clock()
        if limits.rpm != self._limits.rpm:
            self._requests = _resized(self._requests, limits.rpm, now)
        if limits.tpm != self._limits.tpm:
            self._tokens = _resized(self._tokens, limits.tpm, now)
        self._limits = limits
        if self._budget is not None:
            self._budget.limits = limits

    def missing(self) -> dict[str, float]:
        """Return how much is missing from each bucket that is not full."""
        now = self._clock()
        missing = {kind: bucket.capacity - bucket.level(now) for kind, bucket in self._buckets()}
        return {kind: amount for kind, amount in missing.items() if amount > 0}

    def restore(self, missing: dict[str, float], ago_s: float) -> None:
        """Restore the buckets' levels from the amounts that were missing `ago_s` seconds ago."""
        now = self._clock()
        for kind, bucket in self._buckets():
            bucket.charge(max(0.0, missing.get(kind, 0.0) - ago_s * bucket.capacity / 60), now)

    @property
    def is_limited(self) -> bool:
        return self._limits.is_limited

    def request(self) -> None:
        """Count one request. Raises `RateLimited`."""
        self._admit_requests(1)

    def check(self, sequences: int) -> None:
        """Raises `BadRequest` if the request has more sequences than the key may ever run."""
        for limit, text in (
            (self._limits.max_sequences, "in one request"),
            (self._limits.concurrency, "at once"),
            (self._limits.rpm, "in a minute"),
        ):
            if limit and sequences > limit:
                self._reject("sequences")
                message = f"{sequences} sequences in one request; key {self._name!r} may have {limit} {text}."
                raise BadRequest(message, "n")

    def _admit_requests(self, count: int) -> None:
        if self._requests is None or not count:
            return
        now = self._clock()
        if (wait_s := self._requests.wait_s(count, now)) > 0:
            self._reject("requests")
            message = f"Rate limit reached for key {self._name!r}: {self._limits.rpm} requests per minute."
            raise RateLimited(message, "requests", wait_s)
        self._requests.take(count, now)

    def check_concurrency(self, sequences: int = 1) -> None:
        """Raises `RateLimited` if `sequences` more may not start. A request is checked for one sequence before its body
        is read.
        """
        concurrency, running = self._limits.concurrency, self._numbers.sequences
        if concurrency and running + sequences > concurrency:
            self._reject("concurrency")
            message = f"Key {self._name!r} has {running} sequences running, and may have {concurrency}."
            raise RateLimited(message, "requests", BUSY_RETRY_AFTER_S)

    @contextmanager
    def receiving(self) -> Generator[None, None, None]:
        """Count a request while its body is received. The key's concurrency limits these requests too. Raises
        `RateLimited`.
        """
        concurrency = self._limits.concurrency
        if concurrency and self._receiving >= concurrency:
            self._reject("concurrency")
            message = f"Key {self._name!r} is sending {concurrency} requests, as many as it may have at once."
            raise RateLimited(message, "requests", BUSY_RETRY_AFTER_S)
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    def expected(self, max_tokens: int | None) -> float:
        """Return the expected completion tokens of a sequence. Most clients set `max_tokens` far above what
        they use.
        """
        return self._expected_completion if max_tokens is None else min(max_tokens, self._expected_completion)

    @contextmanager
    def hold(self, estimate: float, sequences: int = 1) -> Generator[UsageCharge, None, None]:
        """Count running sequences, and reserve `estimate` tokens until the block ends.

        The usage that the block stores in the charge then replaces the estimate. Raises `BadRequest`, `RateLimited` and
        `BudgetSpent`.
        """
        self.check(sequences)
        self.check_concurrency(sequences)
        self._check_budget(self._numbers.sequences + self._batch_sequences, sequences, self._reserved)
        self._check_tokens(estimate)
        # The first sequence was counted when the request arrived.
        self._admit_requests(sequences - 1)
        self._take_tokens(estimate)
        charge = UsageCharge(estimate, sequences)
        self._numbers.running += 1
        self._numbers.sequences += sequences
        self._reserved += estimate
        try:
            yield charge
        finally:
            self._numbers.running -= 1
            self._numbers.sequences -= sequences
            self._reserved -= estimate
            self._charge_tokens(charge)

    @contextmanager
    def hold_budget(self, estimate: float, sequences: int = 1) -> Generator[UsageCharge, None, None]:
        """Reserve `estimate` tokens of the budgets until the block ends, and count its usage, for a request of a batch.

        Rates and concurrency do not limit batches, which run only while nothing else does. Raises `BadRequest` and
        `BudgetSpent`.
        """
        self.check(sequences)
        self._check_budget(self._numbers.sequences + self._batch_sequences, sequences, self._reserved)
        charge = UsageCharge(estimate, sequences)
        self._batch_sequences += sequences
        self._reserved += estimate
        try:
            yield charge
        finally:
            self._batch_sequences -= sequences
            self._reserved -= estimate
            self._count(charge)

    @contextmanager
    def tokenize_call(self, estimate: float) -> Generator[UsageCharge, None, None]:
        """Charge a fraction of `estimate` for counting a prompt's tokens. Raises `RateLimited`, `BudgetSpent`.

        A failed request is charged for its estimate, because its tokens may have been counted nevertheless. Counting
        uses no budget, but a key with a spent budget may not even count.
        """
        self._check_budget(0, 1, 0.0)
        self._check_tokens(estimate * COUNTING_PART)
        self._take_tokens(estimate * COUNTING_PART)
        charge = UsageCharge(estimate, prompt=int(estimate))
        try:
            yield charge
        finally:
            self._take_tokens((charge.prompt - charge.reserved) * COUNTING_PART)

    def _check_budget(self, running: int, sequences: int, reserved: float) -> None:
        if self._budget is None:
            return
        try:
            self._budget.check(running, sequences, reserved)
        except BudgetSpent:
            self._reject("budget")
            raise

    def _check_tokens(self, amount: float) -> None:
        if self._tokens is not None and (wait_s := self._tokens.wait_s(amount, self._clock())) > 0:
            self._reject("tokens")
            message = f"Rate limit reached for key {self._name!r}: {self._limits.tpm} tokens per minute."
            raise RateLimited(message, "tokens", wait_s)

    def _take_tokens(self, amount: float) -> None:
        # The limit, and with it the bucket, may have changed since the check.
        if self._tokens is not None:
            self._tokens.take(amount, self._clock())

    def _charge_tokens(self, charge: UsageCharge) -> None:
        if self._tokens is not None:
            self._tokens.charge(charge.prompt + charge.completion - charge.reserved, self._clock())
        self._count(charge)

    def _count(self, charge: UsageCharge) -> None:
        self._numbers.prompt_tokens += charge.prompt
        self._numbers.generation_tokens += charge.completion
        if self._budget is not None:
            self._budget.log_use()
        if charge.completion:
            mean = charge.completion / charge.sequences
            self._expected_completion += SMOOTHING * (mean - self._expected_completion)

    def openai_headers(self) -> list[Header]:
        """Return the headers `x-ratelimit-*`."""
        return self._headers("x-ratelimit-{part}-{kind}", _duration)

    def anthropic_headers(self) -> list[Header]:
        """Return the headers `anthropic-ratelimit-*`. They give the reset as a point in time, OpenAI's give it as a
        duration.
        """
        return self._headers("anthropic-ratelimit-{kind}-{part}", _time_after)

    def _headers(self, name: str, format_reset: Callable[[float], str]) -> list[Header]:
        now, headers = self._clock(), list[Header]()
        for kind, bucket in self._buckets():
            values = {
                "limit": str(bucket.capacity),
                "remaining": str(_whole(bucket.level(now))),
                "reset": format_reset(bucket.full_in_s(now)),
            }
            headers += [(name.format(part=part, kind=kind).encode(), value.encode()) for part, value in values.items()]
        return headers

    def _buckets(self) -> list[tuple[str, TokenBucket]]:
        both = (("requests", self._requests), ("tokens", self._tokens))
        return [(kind, bucket) for kind, bucket in both if bucket is not None]

    def _reject(self, reason: str) -> None:
        self._numbers.rejections[reason] += 1


def _bucket(per_minute: int, now: float) -> TokenBucket | None:
    return TokenBucket(per_minute, now) if per_minute else None


def _resized(bucket: TokenBucket | None, per_minute: int, now: float) -> TokenBucket | None:
    """Return a bucket of another size from which the same amount is missing."""
    fresh = _bucket(per_minute, now)
    if fresh is not None and bucket is not None:
        fresh.charge(bucket.capacity - bucket.level(now), now)
    return fresh


def _whole(level: float) -> int:
    # Because of rounding errors, a refilled level may be slightly below a whole number.
    return max(0, int(level + 1e-6))


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `6m0s`, `1.2s`, `20ms`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, left = divmod(seconds, 60)
    return f"{int(minutes)}m{int(left)}s" if minutes else f"{left:.3g}s"


def _time_after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


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
