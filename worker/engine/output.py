"""Writer of output: converts sampled tokens to events, logprobs and the finish reason of a row's next deltas.

Results of one step of a batch.

Outbox of a loop: deltas of one step, sent as one message, with periodic statistics.

Emitter of step results: the output of its rows, as messages to their clients.
"""

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

from protocol.failures import Code, Failure
from protocol.from_worker import (
    Delta,
    DeltaKind,
    Finish,
    Progress,
    PromptLogprob,
    PromptPart,
    Step,
    TokenLogprob,
    Up,
    Usage,
)
from worker.engine.gauges import Gauges
from worker.engine.row import HeldToken, Row, RowText, Token
from worker.engine.scheduling.pacing import PassTime
from worker.errors import RequestInvalid
from worker.output.detokenize import Vocabulary
from worker.output.parsers.events import Event
from worker.output.stops import encodable, without_marks
from worker.sampling.logprobs import LogprobReader, Scores

log = logging.getLogger("mlxd.worker")


@dataclass(slots=True, frozen=True)
class StepOutput:
    """Results of one step; `timed` are the forward passes whose time became known.

    `returned` are rows that have left the batch to wait for their media in the queue. `scoring` are rows with new
    log-probabilities of their prompt, `scored` are rows that have all log-probabilities of their prompt and no output
    yet. `answered` are rows whose questions are all answered.
    """

    tokens: list[Token]
    progress: list[tuple[Row, int, int]]
    broken: list[tuple[Row, Exception]]
    prefilled: int
    timed: Sequence[PassTime]
    returned: list[Row]
    scored: list[tuple[Row, Scores]]
    scoring: list[tuple[Row, Scores]]
    answered: list[Row]


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


_STATS_INTERVAL_S: Final = 0.1
_MEMORY_INTERVAL_S: Final = 1.0
_EMPTY_TEXT: Final = (Event(DeltaKind.TEXT),)


class Outbox:
    """Messages to the gateway, sent through `send` at once or with the next `flush`. Owned by the loop's thread.

    With `one_delta_per_frame` each delta has a message of its own, for data that can fill a frame.
    """

    def __init__(
        self, epoch: int, gauges: Gauges, send: Callable[[Up], None], *, one_delta_per_frame: bool = False
    ) -> None:
        self.send = send
        self._epoch = epoch
        self._gauges = gauges
        self._one_delta_per_frame = one_delta_per_frame
        self._deltas: list[Delta] = []
        self._stats_due = 0.0
        self._memory_due = 0.0

    def add(self, delta: Delta) -> None:
        """Add a delta to the next message."""
        self._deltas.append(delta)

    def add_echo(self, row: Row, logprobs: tuple[TokenLogprob, ...] | None = None) -> None:
        """Add log-probabilities of the next tokens of an echoed prompt. The first call adds the prompt's text too."""
        text = "" if row.report.echo_sent else row.report.echo
        self._deltas.append(Delta(row.rid, text=text, logprobs=logprobs))

    def add_prompt(self, row: Row, logprobs: tuple[PromptLogprob, ...] = ()) -> None:
        """Add log-probabilities of the next tokens of a prompt, or all of the prompt's ids if there are none."""
        self._deltas.append(Delta(row.rid, prompt=PromptPart(() if logprobs else tuple(row.prompt), logprobs)))

    def add_output(
        self, row: Row, output: TokenOutput, usage: Usage | None = None, failure: Failure | None = None
    ) -> None:
        """Add one delta for each event. Ids and logprobs are on the first delta, the end on the last."""
        ids: tuple[int, ...] = tuple(row.text.unsent)
        logprobs, rest = output.logprobs, len(output.events) or 1
        row.text.unsent.clear()
        ending = () if output.finish is None else tuple(held.id for held in row.text.held if not held.is_sent)
        for event in output.events or _EMPTY_TEXT:
            rest -= 1
            is_last = rest == 0
            self._deltas.append(
                Delta(
                    row.rid,
                    event.kind,
                    event.text,
                    ids,
                    event.tool,
                    logprobs,
                    output.finish if is_last else None,
                    usage if is_last else None,
                    failure if is_last else None,
                    row.text.stops.hit if is_last else "",
                    ending_ids=ending if is_last else (),
                )
            )
            ids, logprobs = (), None

    def flush(self, measure: Callable[[], None]) -> None:
        """Send the deltas, with statistics when they are due; `measure` updates the memory gauges."""
        now = time.monotonic()
        is_due = now >= self._stats_due
        if not self._deltas and not is_due:
            return
        if now >= self._memory_due:
            measure()
            self._memory_due = now + _MEMORY_INTERVAL_S
        if is_due:
            self._stats_due = now + _STATS_INTERVAL_S
        deltas, self._deltas = self._deltas, []
        if self._one_delta_per_frame:
            for delta in deltas:
                self.send(Step(self._epoch, self._gauges.step_seq, [delta]))
            deltas = []
            if not is_due:
                return
        self.send(Step(self._epoch, self._gauges.step_seq, deltas, self._gauges.snapshot() if is_due else None))


class FinishRow(Protocol):
    """Callback that ends a row."""

    def __call__(
        self, request: Row, finish: Finish, failure: Failure | None = None, output: TokenOutput | None = None
    ) -> None: ...


class Emitter:
    """Emitter of step results, owned by the engine thread. `finish` ends a row with its last output, or with a
    failure."""

    def __init__(self, writer: OutputWriter, outbox: Outbox, finish: FinishRow) -> None:
        self._writer = writer
        self._outbox = outbox
        self._finish = finish
        self._logprobs = LogprobReader(writer.token_bytes)

    def emit(self, output: StepOutput, now: float, close_reasoning: Callable[[Row], None]) -> None:
        """Send the results of a step; `close_reasoning` is called for a row at the end of its reasoning budget."""
        for row, done, total in output.progress:
            if row.want_progress:
                elapsed_ms = int((now - row.stats.admitted) * 1e3)
                self._outbox.send(Progress(row.rid, done, total, row.stats.cached or 0, elapsed_ms))
            # The prefix cache leaves out the last token, so a row that only prefills ends before that one.
            if row.only_prefills and done + 1 >= total:
                self._finish(row, Finish.LENGTH)
        for row, scores in output.scoring:
            self._send_scores(row, scores)
        for row, scores in output.scored:
            self._send_scores(row, scores)
            if row.is_finished:
                continue
            # this is reset only now, because a row that comes back from a failed step is scored again
            row.report.scored_top = None
            if row.max_tokens <= len(row.output):
                self._finish(row, Finish.LENGTH)
        for row in output.answered:
            if not row.is_finished and row.questions is not None:
                data = array("f", chain.from_iterable(row.questions.answers)).tobytes()
                self._outbox.add(Delta(row.rid, data=data))
                self._finish(row, Finish.STOP)
        closed: set[Row] = set()
        for token, logprob in zip(output.tokens, self._read_logprobs(output.tokens), strict=True):
            if token.row.is_finished or token.row in closed:
                continue  # this token of a verify block comes after the row's end
            if not token.row.stats.first_token:
                token.row.stats.first_token = now
            self.advance(token.row, token.id, token.ended, logprob)
            if token.row.thinking.is_enough and not token.row.is_finished:
                closed.add(token.row)
                close_reasoning(token.row)
        for row, error in output.broken:
            if not row.is_finished:
                self.fail(row, "tokens were chosen", error)

    def advance(self, row: Row, token: int, ended: str | None = None, logprob: TokenLogprob | None = None) -> None:
        """Take one sampled token and send the output that it added."""
        try:
            output = self._writer.advance(row, token, ended, logprob)
        except BaseException as error:  # an error must fail only this row; a panic in Rust is no Exception
            self.fail(row, "its text was decoded", error)
            return
        if output.finish is not None:
            self._finish(row, output.finish, output=output)
        elif not output.is_empty:
            self._outbox.add_output(row, output)

    def fail(self, row: Row, when: str, error: BaseException) -> None:
        """End a row with its own error."""
        if isinstance(error, RequestInvalid):
            self._finish(row, Finish.ERROR, error.failure)
            return
        reason = f"{type(error).__name__}: {error}"
        log.error("row %d failed while %s: %s", row.rid, when, reason)
        failure = Failure(Code.ROW_FAILED, f"the request failed while {when}", encodable(reason))
        self._finish(row, Finish.ERROR, failure)

    def _send_scores(self, row: Row, scores: Scores) -> None:
        """Send the scores of a prompt that were not sent yet: a row that is scored again may have sent some before."""
        if row.is_finished:
            return
        try:
            self._add_scores(row, scores)
        except Exception as error:  # an error must fail only this row
            self.fail(row, "its prompt was scored", error)

    def _add_scores(self, row: Row, scores: Scores) -> None:
        at, fresh = scores.take()
        ids = row.prompt[at : at + len(fresh)]
        report = row.report
        begin = max(0, report.echo_sent - at)
        if report.echo and row.top_logprobs is not None and fresh[begin:]:
            self._outbox.add_echo(row, tuple(self._logprobs.echo(ids[begin:], fresh[begin:], row.top_logprobs)))
            report.echo_sent = at + len(fresh)
        begin = max(0, report.scores_sent - at)
        if report.logprobs is not None and fresh[begin:]:
            self._outbox.add_prompt(row, self._logprobs.prompt(ids[begin:], fresh[begin:], report.logprobs))
            report.scores_sent = at + len(fresh)

    def _read_logprobs(self, tokens: Sequence[Token]) -> list[TokenLogprob | None]:
        wanted = [token for token in tokens if token.row.top_logprobs is not None]
        if not wanted:
            return [None] * len(tokens)
        entries = iter(self._logprobs.read([(each.id, each.logprobs, each.row.top_logprobs or 0) for each in wanted]))
        return [next(entries) if token.row.top_logprobs is not None else None for token in tokens]
