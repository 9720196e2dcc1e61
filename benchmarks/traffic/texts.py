"""Texts of requests by their lengths: invented words for random weights, conversations for the demo model.

Greedy random weights repeat themselves, and drafts of repeated text are nearly always right. The demo model writes
answers that do not repeat: its prompts are held-out samples of the data that it was trained on, in its own template,
filled up with sentences; it ends its answers by itself, so the length drawn is the most that an answer has.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from benchmarks.traffic.lengths import Session
from benchmarks.words import TokenPrompts
from gateway.ctl.bench.closed_loop import BenchRequest

# Topics of a conversation's last question; these have the longest answers.
CATEGORIES: Final = ("two tool calls", "json", "thinking", "tool results")
# Number of sentences that are added between two checks of the prompt's length.
SENTENCES: Final = 4


class Texts(Protocol):
    """Writer of the prompts of a session."""

    def write(self, session: Session) -> list[BenchRequest]: ...


class Words:
    """Prompts of exactly the drawn lengths; a turn's prompt is the one before and more words."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._prompts = TokenPrompts(tokenizer, seed)

    def write(self, session: Session) -> list[BenchRequest]:
        text = ""
        requests: list[BenchRequest] = []
        for turn in session:
            added = self._prompts.make(turn.added)
            text = f"{text} {added}" if text else added
            requests.append(BenchRequest(text, turn.max_tokens))
        return requests


class Conversations:
    """Prompts in the template of the demo model, about as long as drawn.

    A further turn has an earlier question and its answer more than the one before.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        from deploy.demo_model.corpus.words import Source

        self._tokenizer = tokenizer
        self._source = Source(f"traffic {seed}", held_out=True)

    def write(self, session: Session) -> list[BenchRequest]:
        from deploy.demo_model.corpus.generate import sample_of

        sample = sample_of(self._source, self._source.pick(CATEGORIES))
        # Thoughts are in the prompt only until the next question, so later prompts would not begin with earlier ones.
        *messages, answer = ({**each, "reasoning_content": None} for each in sample.messages)
        requests: list[BenchRequest] = []
        length = 0
        for turn in session:
            length += turn.added
            if requests:
                messages += [answer, {"role": "user", "content": self._sentences()}]
            prompt = self._filled(messages, length, sample.tools, sample.thinking)
            requests.append(BenchRequest(prompt, turn.max_tokens))
        return requests

    def _filled(self, messages: list[dict[str, Any]], length: int, tools: Any, thinking: bool) -> str:
        """Render the conversation, with enough sentences before its last question for the wanted length."""
        last = messages[-1]
        while True:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking, tokenize=False
            )
            missing = length - len(self._tokenizer.encode(prompt))
            if missing <= SENTENCES:
                return prompt
            # A sentence has about ten tokens.
            count = max(1, missing // 12)
            last["content"] = f"{self._sentences(count)} {last['content']}"

    def _sentences(self, count: int = 1) -> str:
        return self._source.paragraph(count)


def requests_of(texts: Texts, drawn: Sequence[Session]) -> list[list[BenchRequest]]:
    """Return the requests of each session, in order."""
    return [texts.write(session) for session in drawn]
