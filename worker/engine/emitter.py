"""Emitter of step results: the output of its rows, as messages to their clients."""

import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Progress, TokenLogprob
from worker.engine.outbox import Outbox
from worker.engine.output import OutputWriter, TokenOutput
from worker.engine.row import Row, Token
from worker.engine.step_output import StepOutput
from worker.errors import RequestInvalid
from worker.output.encodable import encodable
from worker.sampling.logprobs import LogprobReader
from worker.sampling.prompt_scores import Scores

log = logging.getLogger("mlxd.worker")


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
