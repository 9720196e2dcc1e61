"""Prompts of one model: from a request's prompt to token ids. A chat is rendered by its template, its text is encoded,
and its media get their places in the tokens.

Each step takes the length of the context, because text that cannot fit is refused before all of it is encoded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocol.failures import Code
from protocol.to_worker import (
    ChatPrompt,
    EmbedPrompt,
    Generate,
    Infill,
    NextTurnPrompt,
    Prompt,
    ScorePrompt,
    SpeechPrompt,
    TextPrompt,
    TokensPrompt,
    TranscribePrompt,
)
from worker.errors import RequestInvalid
from worker.prompt.encode import MAX_CHARS_PER_TOKEN, PromptEncoder
from worker.prompt.infill import InfillPrompts
from worker.prompt.limits_and_truncation import (
    CONTEXTS,
    MAX_COUNTED_CONTEXTS,
    check_countable,
    check_ids,
    empty_prompt,
    fit_tokens,
    fit_turns,
    generates_text,
    is_cut,
    param_of,
    room_of,
    too_long,
)
from worker.prompt.media_prompt import EncodedPrompt, MediaPrompts, NoMedia
from worker.prompt.next_turn import NextTurnPrompts
from worker.prompt.questions import QuestionPrompts, with_slot

# Number of tokens that a cut may add to a text, because it may split a token.
_CUT_EXTRA_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class ModelPrompts:
    """Encoder of prompts of every kind, for one loaded model."""

    encoder: PromptEncoder
    media: MediaPrompts | NoMedia
    infill: InfillPrompts
    next_turns: NextTurnPrompts
    questions: QuestionPrompts
    vocab_size: int

    def of(self, request: Generate, context: int) -> EncodedPrompt:
        """Encode the prompt of a request; truncate it to fit if the request allows truncation. Raises
        `RequestInvalid`."""
        prompt, salt = request.prompt, request.cache_salt
        if request.questions:
            return self._with_questions(request, context)
        if not is_cut(request):
            return self._encode(prompt, salt, context, context)
        most = CONTEXTS * context
        if isinstance(prompt, ChatPrompt) and not request.cuts_tokens:
            return fit_turns(request, prompt, context, lambda part: self._encode(part, salt, context, most))
        opening = self.encoder.opening if _adds_special(prompt) else 0
        return fit_tokens(request, self._encode(prompt, salt, context, most), opening, context)

    def parts(self, prompt: Prompt, context: int) -> Iterable[Sequence[int]]:
        """Return the tokens of a prompt in parts, to be counted; the prompt may be longer than the context. Raises
        `RequestInvalid`."""
        match prompt:
            case TokensPrompt(ids):
                self.check_count(ids, "prompt", context)
                return [ids]
            case TextPrompt(text):
                pass
            case EmbedPrompt() | ScorePrompt() | TranscribePrompt() | SpeechPrompt():
                raise generates_text()
            case NextTurnPrompt():
                return [self._next_turn(prompt, context)]
            case ChatPrompt() if prompt.media:

                def encode(text: str, _placeholders: int) -> list[int]:
                    check_countable(text, "messages", context)
                    return self.encoder.encode(text, add_special_tokens=False)

                ids = self.media.encode(prompt, encode).ids
                self.check_count(ids, "messages", context)
                return [ids]
            case ChatPrompt():
                text = self.media.renderer.render(prompt)
        check_countable(text, param_of(prompt), context)
        return self.encoder.slices(text, add_special_tokens=_adds_special(prompt))

    def check_count(self, ids: Sequence[int], param: str, context: int) -> None:
        """Check ids that are counted or decoded. Raises `RequestInvalid`."""
        most = MAX_COUNTED_CONTEXTS * context
        if len(ids) > most:
            message = f"{param} has {len(ids)} token ids; at most {most} are taken at once."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)
        check_ids(ids, param, self.vocab_size)

    def _with_questions(self, request: Generate, context: int) -> EncodedPrompt:
        """Encode a chat up to its questions, and the questions."""
        if not isinstance(request.prompt, ChatPrompt):
            raise RequestInvalid(Code.INVALID_REQUEST, "questions are asked about a chat", param="questions")
        prompt, rest = with_slot(request.prompt), ""

        def encode(text: str, placeholders: int) -> list[int]:
            nonlocal rest
            head, rest = self.questions.cut(text)
            return self._text(head, prompt, context, context, placeholders)

        encoded = self._chat(prompt, request.cache_salt, encode)
        tokens = len(encoded.ids)
        check_ids(encoded.ids, "prompt", self.vocab_size)
        room_of(request, tokens, context)
        asked = self.questions.encode(request.questions, rest, tokens, encoded.spans, context)
        return replace(encoded, questions=asked)

    def _encode(self, prompt: Prompt, salt: str, context: int, most: int) -> EncodedPrompt:
        """Encode the prompt; refuse it early if it has far more than `most` tokens."""
        match prompt:
            case ChatPrompt():
                encoded = self._chat(prompt, salt, lambda text, more: self._text(text, prompt, context, most, more))
            case TextPrompt(text=text, infill=Infill() as infill):
                characters = sum(map(len, (text, infill.suffix, infill.middle, *(file for _, file in infill.files))))
                if characters > MAX_CHARS_PER_TOKEN * context:
                    raise too_long(characters // MAX_CHARS_PER_TOKEN, prompt, context, "at least ")
                encoded = EncodedPrompt(self.infill.encode(text, infill))
            case TextPrompt(text=text):
                encoded = EncodedPrompt(self._text(text, prompt, context, most), text)
            case TokensPrompt(ids=given):
                encoded = EncodedPrompt(list(given))
            case NextTurnPrompt():
                encoded = EncodedPrompt(self._next_turn(prompt, context))
            case EmbedPrompt() | ScorePrompt() | TranscribePrompt() | SpeechPrompt():
                raise generates_text()
        if not encoded.ids:
            raise empty_prompt()
        check_ids(encoded.ids, "prompt", self.vocab_size)
        return encoded

    def _next_turn(self, prompt: NextTurnPrompt, context: int) -> list[int]:
        return self.next_turns.encode(
            prompt, self.media.renderer.render, lambda chat: self._encode(chat, "", context, context).ids
        )

    def _chat(self, prompt: ChatPrompt, salt: str, encode: Callable[[str, int], list[int]]) -> EncodedPrompt:
        """Encode a chat. `encode` gets its text and the number of tokens that media will add."""
        if prompt.media:
            return self.media.encode(prompt, encode, salt)
        text = self.media.renderer.render(prompt)
        return EncodedPrompt(encode(text, 0), text)

    def _text(self, text: str, prompt: Prompt, context: int, most: int, placeholders: int = 0) -> list[int]:
        """Encode the text of a prompt in which media take `placeholders` more tokens."""
        if placeholders >= most:
            raise too_long(placeholders, prompt, context, "at least ")
        adds_special = _adds_special(prompt)
        # The beginning of text that cannot fit is enough to refuse it; encoding megabytes would take seconds and
        # gigabytes.
        start = text[: MAX_CHARS_PER_TOKEN * most]
        if len(start) < len(text):
            at_least = len(self.encoder.encode(start, add_special_tokens=adds_special))
            if at_least > most + _CUT_EXTRA_TOKENS:
                raise too_long(at_least, prompt, context, "at least ")
        return self.encoder.encode(text, add_special_tokens=adds_special)


def _adds_special(prompt: Prompt) -> bool:
    return isinstance(prompt, TextPrompt) and prompt.adds_special
