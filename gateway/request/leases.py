"""Leases of a request while it is served: admission, its key's rate limit, its model, and its place in the registry."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from gateway.access.caller import is_of_batch_class
from gateway.access.rate_limit import Meter, UsageCharge
from gateway.config.settings import ModelConfig
from gateway.media.modalities import likely_tokens
from gateway.request.in_flight import InFlightRequest
from gateway.request.record import RequestRecord
from gateway.request.runtime import Runtime
from protocol.codec import BYTES_PER_TOKEN, prompt_bytes
from protocol.to_worker import Generate


@contextmanager
def leases(
    runtime: Runtime, model: ModelConfig, generates: Sequence[Generate], served: InFlightRequest
) -> Generator[UsageCharge | None, None, None]:
    """Take all leases for the duration of the block. Yields the charge of the caller's key, to which the usage is added
    at the end.

    If this raises `Overloaded`, `RateLimited` or `Unavailable`, no lease is taken.
    """
    record, count = served.record, len(generates)
    caller = record.caller
    record.is_of_batch_class = is_of_batch_class(generates[0])
    with ExitStack() as held:
        share = caller.queue_share
        if record.is_of_batch_class:
            # Such a request takes no place in a queue from others, and no part of its key's rates.
            runtime.admission.check_open(model.name)
        else:
            held.enter_context(runtime.admission.lease(model, count, caller.key, share))
        charge = None
        if caller.meter is not None:
            estimate = _estimate(caller.meter, generates, record)
            hold = caller.meter.hold_budget if record.is_of_batch_class else caller.meter.hold
            charge = held.enter_context(hold(estimate, count))
        held.enter_context(runtime.pool.lease(model.name))
        held.enter_context(runtime.requests.hold(served))
        if model.adapter:
            running = runtime.metrics.model(model.name).adapters_running
            running[model.adapter] += count
            held.callback(running.subtract, {model.adapter: count})
        yield charge


def _estimate(meter: Meter, generates: Sequence[Generate], record: RequestRecord) -> float:
    """Estimate the tokens that will be charged. A prompt's tokens are estimated by its size, because it is not
    tokenized here.
    """
    if not meter.is_limited:
        return 0.0
    # Each sequence is charged for its prompt, including a stored conversation that it continues. Media are estimated
    # separately, because they have far more bytes than tokens.
    media_tokens = likely_tokens(record.media)
    return sum(
        (prompt_bytes(each) - record.media_bytes) / BYTES_PER_TOKEN + media_tokens + meter.expected(each.max_tokens)
        for each in generates
    )
