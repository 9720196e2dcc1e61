"""Causes for the time that a request took, in plain sentences: what it waited for, and which KV was missing and why."""

from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from gateway.control_types import RequestTiming, SlowCause
from gateway.request.recent_requests import RecentRequest
from protocol.from_worker import Explained, MissCause, MissCode

# Shorter times, a smaller share of the whole time, and fewer tokens of new text are not worth a sentence.
MIN_MS: Final = 1.0
WORTH: Final = 0.01
MIN_TOKENS: Final = 16
# Drafts are worth a sentence if there were many and few were accepted.
_MANY_DRAFTED: Final = 32
_FEW_ACCEPTED: Final = 0.3
_WAITED_FOR: Final = {
    "ready": "it had to wait for memory or for another worker",
    "starting": "it was being loaded",
    "loading": "it was being loaded",
    "draining": "it was being unloaded, and was loaded again",
    "stopping": "it was being unloaded, and was loaded again",
    "backoff": "its worker had crashed and was started again",
    "ttl": "it had been unloaded after its `ttl` without a request",
    "memory": "it had been unloaded, because another model needed the memory",
    "failed": "its last load had failed, and it was loaded again",
}
# Sentences without the numbers. {old} and {new} are excerpts, {message} is the place, {other} the compared request.
_SENTENCES: Final[dict[str, str]] = {
    MissCode.SYSTEM: "The system prompt is not the same as in {other}: {change}",
    MissCode.TOOLS: "The tools are not the same as in {other}: {tools}",
    MissCode.TOOL_ORDER: "The client has reordered the tools: in {other} they were {old}, and now {new}",
    MissCode.SETTINGS: "The settings of the template, such as thinking or effort, are not the same as in {other}: "
    "{change}",
    MissCode.MESSAGE: "The client has changed an earlier message: {message} is not the same as in {other}: {change}",
    MissCode.DATE: "{mover} a date or time in {place}, so the text from there on is another one in each request: "
    "{change}",
    MissCode.MEDIA: "An image, video or audio clip of {message} is not the same as in {other}",
    MissCode.THOUGHTS: "The model's chat template drops the thoughts of earlier answers, so the text after them moves",
    MissCode.THOUGHTS_UNSENT: "The client does not send back the thoughts of {message}, so the text after them moves",
    MissCode.TRUNCATED: "Another number of old turns was left out, because the conversation does not fit the context",
    MissCode.TEMPLATE: "The model's chat template writes earlier messages in another way than in {other}: {change}",
    MissCode.TEXT: "The text is not the same as in {other}: {change}",
    MissCode.SALT: "A request of another key or cache_salt begins with the same text; their caches are not shared",
    MissCode.ADAPTER: "A request for another adapter begins with the same text; their caches are not shared",
    MissCode.EVICTED: "The cached prefix was evicted {ago} before, because {by} needed the memory",
    MissCode.MEMORY: "The cached prefix was evicted {ago} before, because the model's share of memory shrank",
    MissCode.TOO_LARGE: "The prefix cache is too small for a conversation of this length, so its end was not kept",
    MissCode.CHECKPOINT: "This model's cache can only be used from checkpoints, and there was none later in the text",
    MissCode.DISK: "A file of the disk cache could not be read, or not in time",
    MissCode.SCORED: "The request asks for log-probabilities of its prompt, so all of it is computed",
    MissCode.SPARSE: "The prompt ran in a sparse prefill, whose result cannot be cached",
    MissCode.NOT_STORED: "{by} had the same text, but had not finished or was cancelled, so its prefix was not there",
    MissCode.OFF: "The model has no prefix cache, or no memory for it",
    MissCode.NEW: "No recent request has this text, so it is new",
    "reloaded": "The model was loaded again after {other}, and its cache in memory was empty",
}


def slow_causes(
    timing: RequestTiming,
    explained: Explained | None,
    name_of: Callable[[int], str],
    waited_for: str = "",
    served_by: str = "",
) -> list[SlowCause]:
    """Return the causes of a request's time, the worst first. `name_of` returns the id of a request by its rid."""
    causes = [*_waits(timing, waited_for)]
    computed = max(1, timing.prompt_tokens - timing.cached_tokens)
    misses = [] if explained is None else [*_misses(explained, timing.prefill_ms / computed, timing, name_of)]
    left_ms = timing.prefill_ms - sum(miss.ms for miss in misses)
    tokens = max(0, timing.prompt_tokens - timing.cached_tokens - sum(miss.tokens for miss in misses))
    if left_ms >= MIN_MS and (tokens >= MIN_TOKENS or not misses):
        text = f"New text of the prompt was computed{_in(tokens, left_ms)}."
        causes.append(SlowCause("prefill", round(left_ms, 1), text, tokens))
    if served_by:
        causes.append(SlowCause("served_by", 0.0, f"The upstream {served_by} served it, and knows the rest."))
    worth_ms = WORTH * timing.total_ms
    return sorted((each for each in (*misses, *causes) if not 0 < each.ms < worth_ms), key=lambda cause: -cause.ms)


def _waits(timing: RequestTiming, waited_for: str) -> Iterator[SlowCause]:
    if timing.load_ms >= MIN_MS:
        reason = _WAITED_FOR.get(waited_for, "it was not in memory and was loaded")
        yield SlowCause("load", timing.load_ms, f"It waited {span(timing.load_ms)} for its model: {reason}.")
    if timing.queue_ms >= MIN_MS:
        text = f"It waited {span(timing.queue_ms)} in the model's worker, for a place or the disk."
        yield SlowCause("queue", timing.queue_ms, text)
    if timing.paused_ms >= MIN_MS:
        code, reason = "preemption", f"it was preempted {_times(timing.preemptions)} for other requests"
        if not timing.preemptions:
            code, reason = "grammar", f"it waited {_times(timing.grammar_waits)} for the grammar of its format"
        yield SlowCause(code, timing.paused_ms, f"It stood still for {span(timing.paused_ms)}: {reason}.")
    if timing.rested_ms >= MIN_MS:
        yield SlowCause(
            "throttled", timing.rested_ms,
            f"The worker rested {span(timing.rested_ms)} of the time, because the display is in use, or the machine is "
            "hot or on battery.",
        )  # fmt: skip
    if timing.resumes:
        yield SlowCause(
            "resumed", 0.0, f"Its worker was lost {_times(timing.resumes)}, and another one went on with it."
        )
    if timing.decode_ms >= MIN_MS:
        yield SlowCause(
            "decode", timing.decode_ms, f"The answer was generated{_in(timing.completion_tokens, timing.decode_ms)}.",
            timing.completion_tokens,
        )  # fmt: skip
    if timing.drafted_tokens >= _MANY_DRAFTED and timing.accepted_tokens < _FEW_ACCEPTED * timing.drafted_tokens:
        drafts = f"{timing.accepted_tokens} of {timing.drafted_tokens} drafted tokens were accepted"
        yield SlowCause("drafts", 0.0, f"Drafts saved little time: {drafts}.")


def _misses(
    explained: Explained, token_ms: float, timing: RequestTiming, name_of: Callable[[int], str]
) -> Iterator[SlowCause]:
    left = timing.prompt_tokens - timing.cached_tokens
    for cause in explained.causes:
        tokens = left if cause.code == MissCode.OFF else min(left, cause.tokens)
        left -= tokens
        ms = round(tokens * token_ms, 1)
        count = f"; {tokens} tokens were computed again, in about {span(ms)}" if tokens else ""
        if cause.code == MissCode.NEW and tokens:
            count = f": {tokens} tokens were computed, in about {span(ms)}"
        yield SlowCause(cause.code, ms, f"{sentence(cause, explained, name_of)}{count}.", tokens)


def sentence(cause: MissCause, explained: Explained, name_of: Callable[[int], str]) -> str:
    """Return what a cause means, without its costs."""
    template = _SENTENCES.get(cause.code)
    if template is None:  # a worker of a later version
        return f"Cause {cause.code}"
    message = f"message {cause.message}{f' ({cause.role})' if cause.role else ''}" if cause.message >= 0 else "the text"
    before = f", {span(explained.age_s * 1000)} before" if explained.age_s else ""
    tools = ", ".join([*([f"{cause.old} left"] if cause.old else []), *([f"{cause.new} came"] if cause.new else [])])
    return template.format(
        other=f"{name_of(explained.other)}{before}",
        by=name_of(cause.by),
        ago=span(cause.ago_s * 1000),
        message=message,
        place="the text of the template" if cause.role == "template" else message,
        mover="The model's chat template writes" if cause.role == "template" else "The client writes",
        change=f"“{cause.old}” became “{cause.new}”" if cause.old or cause.new else "it changed",
        tools=tools or "they changed",
        old=cause.old,
        new=cause.new,
    )


def reloaded(request: RecentRequest, other: RecentRequest, explained: Explained) -> Explained:
    """Return an explanation in which "new" text is known to be cold because the model was loaded again."""
    new = [replace(cause, code="reloaded") for cause in explained.causes if cause.code == MissCode.NEW]
    causes = (*new, *(cause for cause in explained.causes if cause.code != MissCode.NEW))
    return replace(explained, causes=causes, other=other.rid, age_s=request.at - other.at)


def span(ms: float) -> str:
    """Return a duration for people."""
    seconds = ms / 1000
    if seconds < 1:
        return f"{ms:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _in(tokens: int, ms: float) -> str:
    rate = f", {tokens / ms * 1000:.0f} a second" if tokens else ""
    return f": {tokens} tokens in {span(ms)}{rate}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
