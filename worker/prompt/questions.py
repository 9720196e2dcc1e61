"""Prompts with questions: a chat whose last message ends with one question, for each of the questions.

The chat is rendered once, with a slot for the question. Text up to the slot is the row's prompt, which is encoded once;
a question's tokens are its text and what the template writes after it.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from protocol.failures import Code
from protocol.group import RowQuestion
from protocol.to_worker import ChatPrompt, LabelledQuestion
from worker.engine.row import RowQuestions, slice_ends
from worker.errors import RequestInvalid
from worker.prompt.encode import MAX_CHARS_PER_TOKEN, PromptEncoder
from worker.prompt.family import answer_opening
from worker.prompt.limits_and_truncation import check_ids
from worker.vision.media import Span

# Text in place of the question. Templates neither strip nor change characters of a private-use area.
_SLOT: Final = "\ue0f5\ue0f6\ue0f7"


class QuestionPrompts:
    """Encoder of one model's questions."""

    def __init__(self, encoder: PromptEncoder, family: str, vocab_size: int) -> None:
        self._encoder = encoder
        self._family = family
        self._vocab_size = vocab_size

    def cut(self, text: str) -> tuple[str, str]:
        """Cut a rendered chat at the slot. Returns the text before the question, and the text after it up to the
        answer. Raises `RequestInvalid`."""
        head, slot, rest = text.rpartition(_SLOT)
        if not slot:
            message = "the model's chat template does not show the last message, which holds the question"
            raise RequestInvalid(Code.TEMPLATE_ERROR, message, param="messages")
        return head, rest + answer_opening(self._family, head + rest)

    def encode(
        self, questions: Sequence[LabelledQuestion], rest: str, prompt_tokens: int, media: Sequence[Span], context: int
    ) -> RowQuestions:
        """Encode the questions behind a prompt of this many tokens, each followed by `rest`. A question that does not
        fit the context gets no tokens. Raises `RequestInvalid`."""
        known: dict[str, list[int]] = {}
        asked: list[RowQuestion] = []
        for question in questions:
            for label in question.labels:
                if label not in known:
                    known[label] = self._encode(label)
            labels = [known[label] for label in question.labels]
            _check_labels(labels)
            room = context - prompt_tokens - max(map(len, labels))
            text = question.text + rest
            tokens = self._encode(text) if len(text) <= MAX_CHARS_PER_TOKEN * max(0, room) else []
            asked.append(RowQuestion(tokens if len(tokens) <= room else [], labels))
        edges = repr([(span.begin, span.end) for span in media]).encode()
        layout = blake2b(edges, digest_size=8).hexdigest()
        return RowQuestions(asked, slice_ends(prompt_tokens, media), layout)

    def _encode(self, text: str) -> list[int]:
        ids = self._encoder.encode(text, add_special_tokens=False)
        check_ids(ids, "questions", self._vocab_size)
        return ids


def with_slot(prompt: ChatPrompt) -> ChatPrompt:
    """Return the chat with the slot at the end of its last message, or in a message of its own if the last message is
    not the user's."""
    last = prompt.messages[-1] if prompt.messages else {"role": ""}
    if last["role"] != "user":
        return structs.replace(prompt, messages=[*prompt.messages, {"role": "user", "content": _SLOT}])
    content: Any = last["content"]
    text = f"\n\n{_SLOT}"
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return structs.replace(prompt, messages=[*prompt.messages[:-1], {**last, "content": content}])


def question_salt(questions: RowQuestions | None) -> str:
    """Return the part of a row's salt that is for rows with questions: their KV comes from passes of their own, and is
    shared only by rows whose prompts are cut into slices alike."""
    return "" if questions is None else f"questions:{questions.layout}\0"


def _check_labels(labels: list[list[int]]) -> None:
    """Check that no label is the beginning of another. Raises `RequestInvalid`."""
    ordered = sorted(labels)
    if not ordered[0] or any(other[: len(label)] == label for label, other in pairwise(ordered)):
        message = "the model's tokenizer does not tell the options of a question apart"
        raise RequestInvalid(Code.UNSUPPORTED, message, param="questions")
