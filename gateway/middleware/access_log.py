"""Access log: one line for each request and a warning for a slow one, with ids and timings but no prompts or keys."""

import logging
from typing import Final

from gateway.access.caller import NOBODY
from gateway.access.rate_limit import LogSample
from gateway.request.record import RequestRecord

log = logging.getLogger(__name__)

# Machines poll these paths, and a line for each poll would hide the other lines.
QUIET: Final = frozenset({"/livez", "/readyz", "/health", "/healthz", "/metrics", "/v1/status", "/v1/requests", "/"})
# Prefixes of what editors and the page read again and again. A refused request has its line.
POLLED: Final = ("/v1/models", "/ui/")
_REFUSED: Final = 400


def write(record: RequestRecord, slow_s: float, sample: LogSample, trace_id: str = "") -> None:
    """Log a request that has ended. `sample` selects the requests of unauthenticated clients that are logged.

    `slow_s` 0 disables warnings of slow requests; `trace_id` is the id of the request's exported trace.
    """
    elapsed_s = record.clock() - record.started
    if slow_s and elapsed_s >= slow_s and record.model is not None:
        log.warning(
            "slow request: %s %s took %.1f s", record.method, record.path[:200], elapsed_s,
            extra={"fields": _fields(record, elapsed_s, trace_id)},
        )  # fmt: skip
    is_poll = record.method == "GET" and record.path.startswith(POLLED) and record.status < _REFUSED
    level = logging.DEBUG if is_poll or record.path in QUIET else logging.INFO
    if log.isEnabledFor(level) and (record.caller is not NOBODY or sample.takes(record.client)):
        fields = _fields(record, elapsed_s, trace_id)
        log.log(level, "%s %s", record.method, record.path[:200], extra={"fields": fields})


def _fields(record: RequestRecord, elapsed_s: float, trace_id: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "request": record.id,
        "status": record.status,
        "ms": round(elapsed_s * 1000, 1),
        "client": str(record.client),
    }
    if record.caller.key is not None:
        fields["key"] = record.caller.key
    if record.model is not None:
        fields |= {"model": record.model, "stream": record.stream}
        if record.served_by:
            fields["served_by"] = record.served_by
        # The counts of a generation that goes on without the request are in the log line of its end.
        fields |= {"response": record.answer_id} if record.is_detached else _generation(record)
    trace_id = trace_id or (record.trace.hex_id if record.trace is not None else "")
    if trace_id:
        fields["trace"] = trace_id
    fields["outcome"] = record.outcome or "ok"
    if record.detail:
        fields["detail"] = record.detail
    return fields


def _generation(record: RequestRecord) -> dict[str, object]:
    """Return the ids, times and counts of what the request generated."""
    fields: dict[str, object] = {}
    if record.rids:
        # JavaScript would round these numbers.
        rids = [str(rid) for rid in record.rids]
        fields["rid"] = rids[0] if len(rids) == 1 else rids
    first = record.first_token_s
    fields["ttft_ms"] = None if first is None else round(first * 1000, 1)
    fields |= record.phases.fields()
    fields |= {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
    }
    if record.media:
        # Media are logged as digests: like a prompt, a picture does not belong in a log.
        fields["media"] = [f"{each.kind}:{each.digest.hex()[:16]}" for each in record.media]
        fields["media_bytes"] = record.media_bytes
    if record.finishes:
        fields["finish"] = record.finishes[0] if len(record.finishes) == 1 else list(record.finishes)
    return fields
