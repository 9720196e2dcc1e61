"""Validation of a peer's messages. Wrong numbers must not reach clients, the usage of keys, or metrics."""

import math
from dataclasses import dataclass
from typing import Final

from msgspec.structs import astuple

from protocol.codec import MAX_FRAME_BYTES, MalformedFrame, prompt_bytes
from protocol.from_worker import Accepted, Delta, DeltaKind, Progress, PromptPart, Ready, Usage
from protocol.peering import PeerModel
from protocol.to_worker import Generate

# Maximum value of every count and time that a peer sends.
NUMBER_MAX: Final = 1 << 53
# Assumed context length of a peer's model if the peer does not report it.
CONTEXT_MAX: Final = 1 << 24
ID_MAX: Final = (1 << 31) - 1
# The text of a sequence may have TOKEN_CHARS_MAX characters per token on average, and CHARS_MIN more.
TOKEN_CHARS_MAX: Final = 1024
CHARS_MIN: Final = 1 << 16
# Text of at most this many tokens is held back, for instance because it may be the beginning of a stop string.
HELD_TOKENS_MAX: Final = 4096
# A frame may have FRAME_BYTES, and on average TOKEN_BYTES more for each token and each alternative.
FRAME_BYTES: Final = 1 << 20
TOKEN_BYTES: Final = 64
# Values in `PeerClaims.calls`: NO_CALL if the sequence is in no tool call, then the value for an unknown index.
NO_CALL: Final = -1
_UNKNOWN_CALL: Final = -2


def check_model(model: PeerModel) -> None:
    """Check the numbers of a model in a peer's status. Raises `MalformedFrame`."""
    given: list[object] = [*astuple(model), *(() if model.ready is None else _numbers(model.ready))]
    if not all(0 <= value <= NUMBER_MAX for value in given if isinstance(value, int | float)):
        raise MalformedFrame(f"a number of its model {model.name[:100]!r} is negative or out of range")
    defaults: list[object] = [*model.sampling.values(), *model.thinking.values()]
    if not all(math.isfinite(value) for value in defaults if isinstance(value, float)):
        raise MalformedFrame(f"a default of its model {model.name[:100]!r} is not finite")


def _numbers(ready: Ready) -> list[object]:
    """Return the fields of a loaded model to check. The epoch is left out, because it may be negative."""
    media = () if ready.media is None else astuple(ready.media)
    embedding = () if ready.embedding is None else astuple(ready.embedding)
    audio = () if ready.audio is None else astuple(ready.audio)
    return [*astuple(ready)[1:], *media, *embedding, *audio]


@dataclass(slots=True)
class _SequenceLimits:
    """Limits of one sequence, and what the peer has sent for it so far."""

    resumed_tokens: int
    tokens_max: int
    chars_max: int
    tokens: int
    # Number of the prompt's log-probability entries that may still be sent, and of alternatives that an entry may have.
    prompt_entries: int = 0
    prompt_top: int = 0
    # True until the prompt's token ids are sent, if they were requested.
    allows_prompt_ids: bool = False
    chars: int = 0


class PeerClaims:
    """Checks what one stream sends about its sequences. Each check raises `MalformedFrame`.

    `calls` has the index of each sequence's open tool call, which a stream that resumes the sequence needs.
    """

    def __init__(self, model: PeerModel) -> None:
        ready = 0 if model.ready is None else model.ready.max_context
        self._context = max(model.context, ready) or CONTEXT_MAX
        self._sequences: dict[int, _SequenceLimits] = {}
        self.calls: dict[int, int] = {}
        # Maximum size of a frame of this stream.
        self.frame_bytes = FRAME_BYTES

    def expect(self, request: Generate) -> None:
        """Derive the limits of a sequence from its request."""
        resumed = len(request.resume)
        most = self._context if request.max_tokens is None else min(request.max_tokens, self._context)
        chars = CHARS_MIN + TOKEN_CHARS_MAX * most
        alternatives = 0 if request.top_logprobs is None else 1 + request.top_logprobs
        self.frame_bytes += TOKEN_BYTES * (1 + alternatives) * most
        if request.echo:
            # The text of an echo includes the prompt.
            chars += prompt_bytes(request)
        if request.echo or request.prompt_ids or request.prompt_logprobs is not None:
            self.frame_bytes = MAX_FRAME_BYTES
        self.frame_bytes = min(self.frame_bytes, MAX_FRAME_BYTES)
        entries = 0 if request.prompt_logprobs is None else max(0, self._context - request.prompt_scored)
        self._sequences[request.rid] = _SequenceLimits(
            resumed, max(most, resumed), chars, resumed, entries, request.prompt_logprobs or 0, request.prompt_ids
        )
        self.calls.setdefault(request.rid, _UNKNOWN_CALL if resumed else NO_CALL)

    def check_accepted(self, accepted: Accepted) -> None:
        _must(0 <= accepted.prompt_tokens <= self._context, "its count of the prompt is out of range")
        _must(
            all(0 <= each <= NUMBER_MAX for each in accepted.left_out), "its count of left-out tokens is out of range"
        )

    def check_progress(self, progress: Progress) -> None:
        total = progress.total
        _must(0 <= total <= self._context, "its progress is of more than the context")
        _must(0 <= progress.processed <= total and 0 <= progress.cached <= total, "its progress is out of range")
        _must(0 <= progress.elapsed_ms < 1 << 53, "its progress has no time")

    def check(self, delta: Delta) -> None:
        """Check the next delta of the stream."""
        expected = self._sequences.get(delta.rid)
        if expected is None:
            return  # The link drops deltas of unknown sequences.
        ids = (*delta.token_ids, *delta.ending_ids) if delta.ending_ids else delta.token_ids
        expected.tokens += len(ids)
        _must(expected.tokens <= expected.tokens_max, "more tokens than were asked for")
        _must(not ids or (min(ids) >= 0 and max(ids) <= ID_MAX), "an id of a token is out of range")
        expected.chars += 1 + len(delta.text) + len(delta.stop) + len(delta.logprobs or ())
        if delta.tool is not None:
            expected.chars += len(delta.tool.name) + len(delta.tool.call_id)
        _must(expected.chars <= expected.chars_max, "more text than its tokens can have")
        if delta.prompt is not None:
            _check_prompt(expected, delta, delta.prompt, self._context)
        _must(not delta.data, "vectors or scores, which were not asked for")
        self._check_tool_call(delta)
        if delta.usage is not None:
            self._check_usage(expected, delta.usage)

    def _check_tool_call(self, delta: Delta) -> None:
        """Check and record the beginning, the parts and the end of a tool call."""
        call = self.calls[delta.rid]
        if delta.kind is DeltaKind.TEXT or delta.kind is DeltaKind.REASONING:
            if delta.text:
                self.calls[delta.rid] = NO_CALL
            return
        tool = delta.tool
        if tool is None or tool.index < 0:
            raise MalformedFrame("a part of a tool call does not say of which")
        if delta.kind is not DeltaKind.TOOL_BEGIN:
            _must(call in (tool.index, _UNKNOWN_CALL), "a part of a tool call comes without its beginning")
        self.calls[delta.rid] = NO_CALL if delta.kind is DeltaKind.TOOL_END else tool.index

    def _check_usage(self, expected: _SequenceLimits, usage: Usage) -> None:
        _must(all(0 <= value <= NUMBER_MAX for value in astuple(usage)), "a number of its usage is out of range")
        media = usage.image_tokens + usage.video_tokens + usage.audio_tokens
        _must(usage.kept <= usage.prompt, "its usage has more kept tokens than the prompt has")
        _must(max(usage.prompt, media) <= self._context, "its usage is of a prompt longer than the context")
        # Tokens of a resumed sequence are processed together with its prompt, so they can be cached too.
        cached_max = usage.prompt + expected.resumed_tokens
        _must(usage.cached <= cached_max, "its usage has more cached tokens than the prompt has")
        completion_max = min(expected.tokens_max, expected.tokens + HELD_TOKENS_MAX)
        _must(usage.reasoning <= usage.completion <= completion_max, "its usage has more tokens than came")


def _check_prompt(expected: _SequenceLimits, delta: Delta, part: PromptPart, context: int) -> None:
    """Check a part of the prompt. It must have been requested, be sent once, and come before any output."""
    _must(not (delta.text or delta.token_ids or delta.finish), "a part of its prompt comes with output")
    _must(bool(part.ids or part.logprobs), "an empty part of its prompt")
    _must(not part.ids or expected.allows_prompt_ids, "ids of its prompt, which were not asked for or came before")
    expected.allows_prompt_ids = expected.allows_prompt_ids and not part.ids
    expected.prompt_entries -= len(part.logprobs)
    _must(expected.prompt_entries >= 0, "more log-probabilities of its prompt than were asked for")
    _must(all(len(each.top) <= expected.prompt_top for each in part.logprobs), "more likeliest tokens than asked for")
    ids = (*part.ids, *(token for each in part.logprobs for token in (each.id, *(other for other, _, _ in each.top))))
    _must(len(part.ids) <= context, "ids of its prompt, of more than the context")
    _must(not ids or (min(ids) >= 0 and max(ids) <= ID_MAX), "an id of its prompt is out of range")
    _must(all(0 <= each.rank <= ID_MAX for each in part.logprobs), "a rank of its prompt is out of range")
    texts = (text for each in part.logprobs for text in (each.token, *(other for _, other, _ in each.top)))
    _must(all(len(text) <= TOKEN_CHARS_MAX for text in texts), "a token of its prompt is longer than any is")


def _must(is_possible: bool, problem: str) -> None:
    if not is_possible:
        raise MalformedFrame(problem)
