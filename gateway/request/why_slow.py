"""Why a request was slow: the causes of its times, and its comparison with an earlier request.

Causes for the time that a request took, in plain sentences: what it waited for, and which KV was missing and why.

Explanation of one request that has ended: its facts, and what its model's worker knows of its prompt.

Diagnosis of a request's prompt: its comparison with that of an earlier request, which the client names.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from msgspec.structs import replace

from gateway.control_types import RequestTiming, RequestWhy, SlowCause
from gateway.link.link import CallRefused
from gateway.link.transport import WorkerGone
from gateway.request.in_flight import RecentRequest
from gateway.request.opener import Runtime
from gateway.request.record import RequestRecord
from protocol.codec import Unsendable
from protocol.from_worker import Explained, MissCause, MissCode
from protocol.to_worker import Explain

log = logging.getLogger(__name__)

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


ANSWER_TIMEOUT_S: Final = 5.0
UNKNOWN: Final = SlowCause("unknown", 0.0, "Its worker has ended or has forgotten its prompt, so misses have no cause.")


async def ask_worker(
    runtime: Runtime, model: str, epoch: int, rid: int, other: int = 0, *, shows_text: bool, crosses_salts: bool
) -> Explained | None:
    """Ask a worker why tokens of a request's prompt were not cached. Returns None if it has ended or does not know."""
    worker = runtime.pool.find(model)
    if worker is None or not rid or worker.epoch != epoch or not worker.is_ready:
        return None
    call = Explain(runtime.link.next_rid(), rid, other, shows_text, crosses_salts)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await runtime.link.call(epoch, call)
    except (CallRefused, WorkerGone, Unsendable, TimeoutError) as error:
        log.debug("no explanation of request %d: %s", rid, error)
        return None
    return answer if isinstance(answer, Explained) and (answer.prompt or answer.causes) else None


async def explain(runtime: Runtime, request: RecentRequest, *, shows_text: bool) -> RequestWhy:
    """Return why a request took its time. Texts are shown only to the owner of its key, else they are hashes."""
    explained = await ask_worker(
        runtime, request.model, request.epoch, request.rid, shows_text=shows_text, crosses_salts=True
    )
    before = runtime.recent.before(request)
    if explained is not None and before is not None and before.epoch != request.epoch:
        explained = reloaded(request, before, explained)

    def name_of(rid: int) -> str:
        other = runtime.recent.of_rid(rid)
        return f"request {other.id}" if other is not None else "another request"

    other = runtime.recent.of_rid(explained.other) if explained is not None else None
    causes = slow_causes(request.timing, explained, name_of, request.waited_for, request.served_by)
    if explained is None and request.rid and not request.served_by:
        causes.append(UNKNOWN)
    return RequestWhy(
        id=request.id,
        answer_id=request.answer_id,
        model=request.model,
        key=request.key,
        path=request.path,
        at=request.at,
        outcome=request.outcome,
        timing=request.timing,
        causes=causes,
        compared=other.id if other is not None else "",
    )


# Causes that are no difference between the two texts.
_OF_KV: Final = frozenset(
    {
        MissCode.EVICTED,
        MissCode.MEMORY,
        MissCode.TOO_LARGE,
        MissCode.CHECKPOINT,
        MissCode.DISK,
        MissCode.SCORED,
        MissCode.SPARSE,
        MissCode.NOT_STORED,
        MissCode.OFF,
        MissCode.NEW,
    }
)


class Diagnosis:
    """Comparison of a request with the one of an earlier answer of the same key. `run` asks the worker for it.

    `other` is None if no request of the key has such an answer among the newest ones. `explained` is None until the
    worker has answered, and if it cannot.
    """

    def __init__(self, runtime: Runtime, record: RequestRecord, answer_id: str) -> None:
        self._runtime = runtime
        self._record = record
        found = runtime.recent.find(answer_id)
        is_own = found is not None and found.answer_id == answer_id and found.key == record.caller.key
        self.other: RecentRequest | None = found if is_own else None
        self.explained: Explained | None = None
        # Whether there is nothing to wait for any more.
        self.is_final = self.other is None or self.is_other_model

    @property
    def is_other_model(self) -> bool:
        return self.other is not None and self.other.model != self._record.model

    async def run(self, rid: int, epoch: int) -> None:
        """Compare the prompts, once the request's worker knows both."""
        other = self.other
        if self.is_final or other is None:
            return
        if other.epoch != epoch or not other.rid:
            self.is_final = True
            return
        self.explained = await ask_worker(
            self._runtime, other.model, epoch, rid, other.rid, shows_text=True, crosses_salts=False
        )
        self.is_final = self.explained is not None

    @property
    def difference(self) -> MissCause | None:
        """The first difference between the two texts; None if there is none, or none is known."""
        causes = () if self.explained is None else self.explained.causes
        return next((cause for cause in causes if cause.code not in _OF_KV), None)

    @property
    def is_compared(self) -> bool:
        """Whether the worker has compared both texts."""
        return self.explained is not None and self.other is not None and self.explained.other == self.other.rid

    def words(self, cause: MissCause) -> str:
        """Return what a difference means."""
        assert self.explained is not None
        return f"{sentence(cause, self.explained, lambda _: 'the compared request')}."
