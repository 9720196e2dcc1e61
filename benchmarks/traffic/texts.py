"""Texts of requests by their lengths: invented words for random weights, conversations for the demo model, and this
repository's pages and sources for real weights.

Greedy random weights repeat themselves, and drafts of repeated text are nearly always right. The demo model writes
answers that do not repeat: its prompts are held-out samples of the data that it was trained on, in its own template,
filled up with sentences; it ends its answers by itself, as real models do, so the length drawn is the most that an
answer has.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.traffic.lengths import Session
from benchmarks.words import TokenPrompts
from gateway.ctl.bench.closed_loop import BenchRequest

# Topics of a conversation's last question; these have the longest answers.
CATEGORIES: Final = ("two tool calls", "json", "thinking", "tool results")
# Number of sentences that are added between two checks of the prompt's length.
SENTENCES: Final = 4
ROOT: Final = Path(__file__).parents[2]
# Shorter prompts quote nothing.
LEAST_QUOTED: Final = 80
# Tokens of the template and of the question, which are part of a prompt's length.
FRAME_TOKENS: Final = 60


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


class PagesAndSources:
    """Prompts about a part of this repository's pages or sources, in the model's template, about as long as drawn.

    The list `edit` asks for a file with a name changed, `agent` quotes another file at each turn, and the other lists
    ask about a page.
    """

    def __init__(self, tokenizer: Any, list_name: str, seed: int) -> None:
        self._tokenizer = tokenizer
        self._list = list_name
        self._random = random.Random(f"{list_name} {seed}")
        pages = sorted(ROOT.glob("docs/*.md"))
        sources = sorted(
            path for folder in ("gateway", "worker", "protocol") for path in ROOT.glob(f"{folder}/**/*.py")
        )
        files = {path.relative_to(ROOT): path.read_text() for path in (*pages, *sources)}
        # A quoted control token would be one.
        self._files = {path: text for path, text in files.items() if "<|" not in text}

    def write(self, session: Session) -> list[BenchRequest]:
        messages: list[dict[str, str]] = []
        requests: list[BenchRequest] = []
        for turn in session:
            path, content = self._question(turn.added)
            if messages:
                messages.append({"role": "assistant", "content": f"I have read it. The next file is {path}."})
            messages.append({"role": "user", "content": content})
            prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            requests.append(BenchRequest(prompt, turn.max_tokens))
        return requests

    def _question(self, tokens: int) -> tuple[Path, str]:
        """Return the file that is asked about, and a question of about so many tokens."""
        suffixes = {"edit": [".py"], "agent": [".md", ".py"]}.get(self._list, [".md"])
        path = self._random.choice([path for path in self._files if path.suffix in suffixes])
        if tokens < LEAST_QUOTED:
            line = self._random.choice([line for line in self._files[path].splitlines() if line.strip()])
            return path, f"Explain in a few sentences: {line.strip('# ')[:LEAST_QUOTED]}"
        quoted = self._quoted(path, tokens - FRAME_TOKENS)
        if self._list != "edit":
            return path, f"This is a part of {path}:\n\n{quoted}\n\nWhat must somebody know who uses this?"
        names = sorted({word for word in quoted.replace("(", " ").split() if word.isidentifier() and "_" in word})
        name = self._random.choice(names or ["self"])
        return path, f"Rename {name} to {name}_now in this file and write the whole file again.\n\n{quoted}"

    def _quoted(self, path: Path, tokens: int) -> str:
        """Return so many tokens from somewhere in the file, and of the files behind it if it is shorter."""
        paths = [each for each in self._files if each.suffix == path.suffix]
        ids: list[int] = []
        at = paths.index(path)
        while len(ids) < tokens:
            more = self._tokenizer.encode(self._files[paths[at % len(paths)]], add_special_tokens=False)
            start = self._random.randrange(max(1, len(more) - tokens)) if not ids else 0
            ids += more[start : start + tokens - len(ids)]
            at += 1
        return self._tokenizer.decode(ids)


def requests_of(texts: Texts, drawn: Sequence[Session]) -> list[list[BenchRequest]]:
    """Return the requests of each session, in order."""
    return [texts.write(session) for session in drawn]
