"""Writer of output: converts sampled tokens to events, logprobs and the finish reason of a row's next deltas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.from_worker import DeltaKind, Finish, TokenLogprob
from worker.engine.row import HeldToken, Row, RowText
from worker.output.detokenize import Vocabulary
from worker.output.parsers.events import Event
from worker.output.stops import without_marks


@dataclass(slots=True, frozen=True)
class TokenOutput:
    """Output added by one token. No part of its text can still become a stop string or markup."""

    events: list[Event]
    logprobs: tuple[TokenLogprob, ...] | None
    finish: Finish | None

    @property
    def is_empty(self) -> bool:
        return not self.events and self.logprobs is None and self.finish is None


class OutputWriter:
    """Detokenization, stop strings, parsing, and the alignment of logprobs with the text that is sent."""

    def __init__(self, vocabulary: Vocabulary, controls: Mapping[int, str] | None = None) -> None:
        """`controls` are control tokens, which parsers must distinguish from text that looks the same."""
        self._controls = controls or {}
        self.token_bytes = vocabulary.token_bytes

    def advance(self, row: Row, token: int, ended: str | None, logprob: TokenLogprob | None) -> TokenOutput:
        """Take one sampled token; `ended` is mlx-lm's finish reason. An end-of-sequence token has text only if the
        output includes stops, and a logprob only in a row with an echo."""
        out = row.text
        row.stats.completion += 1
        is_eos = ended == "stop"
        text = ""
        if not is_eos:
            row.output.append(token)
            out.held.append(HeldToken(out.seen, token, logprob))
            text = out.detokenizer.add(token)
            if token in self._controls:
                _note_control(out, text, self._controls[token])
            if out.marks and token in out.marks:
                text += out.marks[token]
                out.marked += 1
        elif out.includes_stop:
            text = out.detokenizer.add(token)
        if ended is not None:
            text += out.detokenizer.finish()
        out.seen += len(text)
        has_stops = row.stats.completion > row.sampling.min_tokens
        safe, is_stopped = out.stops.feed(text) if has_stops else (text, False)
        if ended is not None and not is_stopped:
            safe += out.stops.flush()
        out.safe += len(safe)
        out.pending += safe
        if not is_eos:
            out.held[-1].safe = out.safe
        finish = None
        if is_stopped or is_eos:
            finish = Finish.STOP
        elif ended is not None:
            finish = Finish.LENGTH
        logprobs = _release(out, is_stopped)
        if finish is not None:
            out.ready = out.safe
        events = self._parse(row, is_end=finish is not None, is_cut=not is_eos)
        if out.is_one_call and (at := _first_end(events)) is not None:
            # Events after the call are dropped, even if the same token completed them.
            events, finish = events[: at + 1], Finish.STOP
        if finish is Finish.STOP and out.parser is not None and out.parser.saw_tool_call:
            # A malformed call must not be reported as a complete one.
            finish = Finish.LENGTH if out.parser.is_broken else Finish.TOOL_CALLS
        if is_eos:
            # The end-of-sequence token has no text that could become safe and release its id, so the id is sent with
            # the row's end.
            out.held.append(HeldToken(out.seen, token))
        if is_eos and row.report.echo and logprob is not None:
            # Clients that score texts rely on an entry for each token.
            logprobs = (*(logprobs or ()), logprob)
        return TokenOutput(events, logprobs, finish)

    def replay(self, row: Row, ids: Sequence[int]) -> None:
        """Resume a row of an earlier worker: the row's client has `ids` and the text that is safe with them."""
        out = row.text
        for token in ids:
            self.advance(row, token, None, None)
        out.unsent.clear()
        for held in out.held:
            held.is_sent = True
        out.resumed = out.safe

    def _parse(self, row: Row, is_end: bool, is_cut: bool) -> list[Event]:
        """Turn text into events. A token that opens or ends a reasoning block counts as reasoning."""
        out = row.text
        count = out.ready - out.sent
        text, out.pending = out.pending[:count], out.pending[count:]
        count_known = max(0, min(out.resumed - out.sent, count))
        out.sent = out.ready
        known, new = text[:count_known], text[count_known:]
        if out.marks:
            known, new = without_marks(known), without_marks(new)
        if out.parser is None:
            return [Event(DeltaKind.TEXT, new)] if new else []
        was_reasoning = row.thinking.is_open
        if known:
            out.parser.feed(known)  # the client already has these events
        events = out.parser.feed(new) if new else []
        if is_end:
            events += out.parser.finish(is_cut)
        row.thinking.is_open = out.parser.in_reasoning
        row.thinking.tokens += was_reasoning or row.thinking.is_open
        return events


def _first_end(events: Sequence[Event]) -> int | None:
    """Return the index of the event that ends the first tool call."""
    return next((at for at, event in enumerate(events) if event.kind is DeltaKind.TOOL_END), None)


def _release(out: RowText, is_stopped: bool) -> tuple[TokenLogprob, ...] | None:
    """Release the tokens that have safe text; the tokens of a stop string are never released.

    Text is sent only as far as it was safe with the newest released token. Tokens that are still held may have made
    further text safe, but a successor that resumes from the released ids would send that text again.
    """
    is_all_safe = out.safe == out.seen and not is_stopped
    held, logprobs = out.held, list[TokenLogprob]()
    while held and (is_all_safe or held[0].begin < out.safe):
        newest = held.popleft()
        out.ready = newest.safe
        if newest.is_sent:
            continue
        out.unsent.append(newest.id)
        if newest.logprob is not None:
            logprobs.append(newest.logprob)
    return tuple(logprobs) or None


def _note_control(out: RowText, text: str, content: str) -> None:
    """Report the position of a control token to the parser. If the tokenizer's text does not show the position, tell
    the parser to ignore control tokens."""
    if out.parser is None:
        return
    if text.endswith(content):
        out.parser.note_control(out.seen - out.marked + len(text) - len(content))
    else:
        out.parser.ignore_controls()
