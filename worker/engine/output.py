"""Sampled tokens to the events, logprobs and end that a row's next deltas carry."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import DeltaKind, Finish, Sampling, TokenLogprob
from worker.engine.row import HeldToken, Row
from worker.output.detokenize import Vocabulary
from worker.output.parsers import Event
from worker.output.stops import StopScanner


@dataclass(slots=True, frozen=True)
class TokenOutput:
    """Output added by one token. Its text is safe to send: no part of it can still become a stop string or markup."""

    events: list[Event]
    logprobs: tuple[TokenLogprob, ...] | None
    finish: Finish | None

    @property
    def is_empty(self) -> bool:
        return not self.events and self.logprobs is None and self.finish is None


class OutputWriter:
    """Detokenizing, stop strings, parsing, and the alignment of logprobs with the text that is out."""

    def __init__(self, vocabulary: Vocabulary, controls: Mapping[int, str] | None = None) -> None:
        """`controls` are the tokens that parsers know apart from text that looks like them."""
        self._vocabulary = vocabulary
        self._controls = controls or {}
        self.token_bytes = vocabulary.token_bytes

    def silent_row(self, prompt: list[int]) -> Row:
        """A row for warming up: two greedy tokens that no client reads."""
        return Row(
            rid=0,
            prompt=prompt,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
            max_tokens=2,
            detokenizer=self._vocabulary.detokenizer(),
            stops=StopScanner(()),
            arrived=time.monotonic(),
        )

    def advance(self, row: Row, token: int, ended: str | None, logprob: TokenLogprob | None) -> TokenOutput:
        """Take one sampled token; `ended` is mlx-lm's reason. An end-of-sequence token has no text, and a
        logprob only behind an echo."""
        row.completion += 1
        is_eos = ended == "stop"
        text = ""
        if not is_eos:
            row.output.append(token)
            row.held.append(HeldToken(row.text_seen, token, logprob))
            text = row.detokenizer.add(token)
            if token in self._controls:
                self._note_control(row, text, self._controls[token])
        elif row.includes_stop:
            text = row.detokenizer.add(token)
        if ended is not None:
            text += row.detokenizer.finish()
        row.text_seen += len(text)
        is_looked_for = row.completion > row.sampling.min_tokens
        safe, is_stopped = row.stops.feed(text) if is_looked_for else (text, False)
        if ended is not None and not is_stopped:
            safe += row.stops.flush()
        row.text_safe += len(safe)
        row.pending += safe
        if not is_eos:
            row.held[-1].safe = row.text_safe
        finish = None
        if is_stopped or is_eos:
            finish = Finish.STOP
        elif ended is not None:
            finish = Finish.LENGTH
        logprobs = self._release(row, is_stopped)
        if finish is not None:
            row.text_ready = row.text_safe
        events = self._parse(row, is_end=finish is not None, is_cut=not is_eos)
        if row.is_one_call and (at := _first_end(events)) is not None:
            # What comes after the call is not wanted, and neither is what this token may have said of it.
            events, finish = events[: at + 1], Finish.STOP
        if finish is Finish.STOP and row.parser is not None and row.parser.saw_tool_call:
            # A malformed call must not look like one that is whole.
            finish = Finish.LENGTH if row.parser.is_broken else Finish.TOOL_CALLS
        if is_eos:
            # It has no text that could let go of it: its id goes with the end.
            row.held.append(HeldToken(row.text_seen, token))
        if is_eos and row.echo and logprob is not None:
            # Clients that score texts count on an entry for each token.
            logprobs = (*(logprobs or ()), logprob)
        return TokenOutput(events, logprobs, finish)

    def replay(self, row: Row, ids: Sequence[int]) -> None:
        """Bring a row to where an earlier worker left it: the client has `ids` and the text that is safe with them."""
        for token in ids:
            self.advance(row, token, None, None)
        row.unsent.clear()
        for held in row.held:
            held.is_sent = True
        row.text_resumed = row.text_safe

    def _parse(self, row: Row, is_end: bool, is_cut: bool) -> list[Event]:
        """Text to events; a token that opens or ends a block of reasoning counts as part of it."""
        count = row.text_ready - row.text_sent
        text, row.pending = row.pending[:count], row.pending[count:]
        known = max(0, min(row.text_resumed - row.text_sent, count))
        row.text_sent = row.text_ready
        if row.parser is None:
            return [Event(DeltaKind.TEXT, text[known:])] if text[known:] else []
        was_reasoning = row.is_reasoning
        if known:
            row.parser.feed(text[:known])  # the client has these events
        events = row.parser.feed(text[known:]) if text[known:] else []
        if is_end:
            events += row.parser.finish(is_cut)
        row.is_reasoning = row.parser.in_reasoning
        row.reasoning += was_reasoning or row.is_reasoning
        return events

    def _note_control(self, row: Row, text: str, content: str) -> None:
        """Tell the parser where the token's text begins, or that this cannot be told of this tokenizer."""
        if row.parser is None:
            return
        if text.endswith(content):
            row.parser.note_control(row.text_seen + len(text) - len(content))
        else:
            row.parser.ignore_controls()

    def _release(self, row: Row, is_stopped: bool) -> tuple[TokenLogprob, ...] | None:
        """Let go of the tokens of which some text is safe; those of a stop string never leave.

        Text leaves up to what was safe with the newest of them. More may be safe by now, because of tokens that are
        held: a successor that is given the ids that are out could not know of it, and would send that text again.
        """
        is_level = row.text_safe == row.text_seen and not is_stopped
        held, logprobs = row.held, list[TokenLogprob]()
        while held and (is_level or held[0].begin < row.text_safe):
            newest = held.popleft()
            row.text_ready = newest.safe
            if newest.is_sent:
                continue
            row.unsent.append(newest.id)
            if newest.logprob is not None:
                logprobs.append(newest.logprob)
        return tuple(logprobs) or None


def _first_end(events: Sequence[Event]) -> int | None:
    """Index of the event that ends the first tool call."""
    return next((at for at, event in enumerate(events) if event.kind is DeltaKind.TOOL_END), None)
