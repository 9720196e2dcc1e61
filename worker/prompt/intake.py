"""Intake of generation requests: renders, encodes and validates each `Generate` to make a `Row`, on its own thread.

MLX checks no bounds, so every token id that could reach it is checked here.

Control tokens of chats: those that begin messages, and the one with which a chat template ends an answer.
"""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, Final

from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import Tokenized
from protocol.spec import IMAGE_PIXELS_MAX
from protocol.to_worker import (
    ChatPrompt,
    Constraint,
    Detokenize,
    EmbedPrompt,
    Generate,
    Infill,
    NextTurnPrompt,
    Prompt,
    Sampling,
    ScorePrompt,
    SpeechPrompt,
    TextPrompt,
    Tokenize,
    TokensPrompt,
    TranscribePrompt,
)
from worker.engine.output import OutputWriter
from worker.engine.row import PromptReport, Row, RowQuestions, RowStats, RowText
from worker.errors import RequestInvalid
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import Adapter, adapters_of
from worker.output.detokenize import Vocabulary
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.prompt.encode import PromptEncoder, WordIds
from worker.prompt.family import ModelFamily, families_of
from worker.prompt.infill import InfillPrompts
from worker.prompt.limits_and_truncation import (
    CONTEXTS,
    MAX_CHARS_PER_TOKEN,
    MAX_COUNTED_CONTEXTS,
    NO_SPARSE,
    SparseLimits,
    check_countable,
    check_ids,
    check_limits,
    check_sampling,
    empty_prompt,
    fit_tokens,
    fit_turns,
    generates_text,
    is_cut,
    name_kept,
)
from worker.prompt.media_prompt import EncodedPrompt, open_media, unserved
from worker.prompt.miss_explainer import RecentPrompts
from worker.prompt.next_turn import NextTurnPrompts
from worker.prompt.questions import QuestionPrompts, question_salt, with_slot
from worker.prompt.templates import Renderer
from worker.sampling.logprobs import scored_top
from worker.speculation.draft_state import UNLIMITED_DRAFT_TOKENS, Drafting
from worker.speculation.text_sources import BREAK
from worker.structured.row_constraint import Rules
from worker.structured.tool_rules import DEFAULT_CALL_TOKENS, ToolRules
from worker.vision.images import MediaLimits

log = logging.getLogger("mlxd.worker")

_WORD: Final = "word1"
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": _WORD},
    {"role": "user", "content": "y"},
]


class TurnStarts:
    """Finder of the control tokens that begin messages."""

    def __init__(
        self, encoder: PromptEncoder, generation_prompt: str, hidden: frozenset[int], suppressed: Collection[int]
    ) -> None:
        """`generation_prompt` is the text that a template adds before an answer. Its first control token begins each
        message; if it has none, all `hidden` tokens do. Tokens in `suppressed` stand for media."""
        first = encoder.encode(generation_prompt, add_special_tokens=False)[:1]
        self._tokens = (frozenset(first) & hidden or hidden) - set(suppressed)

    def positions(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of messages after the first token."""
        return [at for at, token in enumerate(ids) if token in self._tokens and at > 0]


def warn_of_open_end(renderer: Renderer, family: str, tokenizer: Any, eos_ids: Container[int]) -> None:
    """Log the control token that ends answers in the template and is no end-of-sequence token, if there is one.

    It does not become one, because only the model's makers know whether it ends an answer or a part of it.
    """
    # Answers of these families have several messages, which end with another token than the answer.
    if isinstance(FAMILIES[family].grammar, Channels):
        return
    if token := _open_end(renderer, tokenizer, eos_ids):
        log.warning(
            "the chat template ends answers with %s, which is not an end-of-sequence token: answers may go on to "
            "their limit; add its id to eos_token_id in generation_config.json",
            token,
        )


def _open_end(renderer: Renderer, tokenizer: Any, eos_ids: Container[int]) -> str:
    if not renderer.has_template:
        return ""
    try:
        _, has_answer, after = renderer.render(ChatPrompt(_CHAT)).rpartition(_WORD)
    except RequestInvalid:
        return ""
    first = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1] if has_answer else []
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return next((added[token].content for token in first if token in added and token not in eos_ids), "")


# Number of tokens at a prompt's end that are decoded to find whether the prompt ends inside reasoning.
_PROMPT_END_TOKENS = 4096
# Number of tokens that a cut may add to a text, because it may split a token.
_CUT_EXTRA_TOKENS: Final = 16
# Limits of a request's media if the worker's specification has none.
DEFAULT_LIMITS: Final = MediaLimits(bytes=32 << 20, count=64, pixels=IMAGE_PIXELS_MAX)


class Intake:
    """Converter of requests to rows, for one loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        parser: str = "",
        limits: MediaLimits | None = None,
        memory_bytes: int = 0,
        sparse: SparseLimits = NO_SPARSE,
    ) -> None:
        """`limits` apply to a request's media; `memory_bytes` bounds the pixels of an image, and 0 means no limit."""
        self._sparse = sparse
        self._encoder = PromptEncoder(loaded.tokenizer)
        self._vocab_size = loaded.vocab_size
        self._table_rows = max(loaded.vocab_size, loaded.table_rows)
        self.max_context = loaded.max_context
        self._limits = limits or DEFAULT_LIMITS
        # `_media` is None for a model that takes no media; the reason is in `no_media`.
        family, tool_family = families_of(loaded, parser)
        self._media, self.no_media = open_media(loaded, self._encoder, self._limits, memory_bytes, tool_family)
        # Kinds of media that a prompt may contain.
        self.modalities = self._media.modalities if self._media is not None else ()
        self.media_processor = self._media.processor if self._media is not None else None
        self._renderer = (
            self._media.renderer if self._media is not None else Renderer(loaded.tokenizer, tool_family=tool_family)
        )
        opened, closed = self._renderer.probe()
        self._family = ModelFamily(loaded, opened, family, tool_family)
        self.vocabulary = Vocabulary(loaded.tokenizer)
        self.recent = RecentPrompts()
        self._chat_vocabulary = Vocabulary(loaded.tokenizer, self._family.visible)
        # Vocabulary in which special tokens have text; made when the first request asks for them in its output.
        self._whole_vocabulary: Vocabulary | None = None
        self._infill = InfillPrompts(loaded.tokenizer, self._encoder, loaded.vocab_size)
        self._adapters = adapters_of(loaded.model)
        self._questions = QuestionPrompts(self._encoder, self._family.family, loaded.vocab_size)
        self._words = WordIds(self._encoder, self.vocabulary, loaded.vocab_size)
        self.writer = OutputWriter(self.vocabulary, self._family.controls)
        self._rules = Rules(
            loaded.tokenizer, self._family.family, loaded.vocab_size, loaded.eos_ids, self.vocabulary.token_bytes
        )
        self._tool_rules = ToolRules(self._rules, loaded.tokenizer, self._family.tool_family, loaded.eos_ids)
        self._eos_ids = tuple(loaded.eos_ids)
        warn_of_open_end(self._renderer, self._family.family, loaded.tokenizer, self._eos_ids)
        self._next_turns = NextTurnPrompts(
            self.recent,
            self._chat_vocabulary,
            self.writer,
            self._family,
            self._render,
            lambda chat: self._encode(chat, "").ids,
        )
        self._suppressed = tuple(loaded.vision.needs.suppressed) if loaded.vision is not None else ()
        self._relaxed = loaded.relaxed
        self._turn_starts = TurnStarts(self._encoder, opened[len(closed) :], self.vocabulary.hidden, self._suppressed)

    @property
    def has_chat_template(self) -> bool:
        return self._renderer.has_template

    def limit_context(self, tokens: int) -> None:
        """Reduce the maximum length of a sequence to the length that memory allows."""
        if tokens < self.max_context:
            log.warning("memory limits the context to %d of %d tokens", tokens, self.max_context)
            self.max_context = tokens

    def row(self, request: Generate, arrived: float) -> Row:
        """Return a validated row. Its rule is set later, by `restrict`. Raises `RequestInvalid`."""
        check_sampling(request, self._vocab_size, is_restricted=self.is_restricted(request))
        adapter = self._adapter(request.adapter)
        encoded, questions = self._encode_asked(request) if request.questions else (self._encode_fitting(request), None)
        ids, text = encoded.ids, encoded.text
        # The model itself sampled the ids in `resume`. Its table may have rows beyond the vocabulary.
        check_ids(request.resume, "resume", self._table_rows)
        keep = self._sparse.keep_of(request, len(ids), has_media=bool(encoded.spans))
        is_chat = isinstance(request.prompt, ChatPrompt | NextTurnPrompt)
        row = Row(
            rid=request.rid,
            prompt=ids,
            sampling=self._sampling(request),
            max_tokens=self._room(len(ids), request) if questions is None else 1,
            text=RowText.of(request, ids, self._vocabulary_of(request, is_chat=is_chat)),
            stats=RowStats(arrived),
            report=PromptReport(
                echo=(text if text is not None else self.vocabulary.decode(ids)) if request.echo else "",
                sends_ids=request.prompt_ids,
                scored_top=scored_top(request, len(ids)),
                logprobs=request.prompt_logprobs,
                scores_sent=request.prompt_scored,
                echo_sent=request.echo_scored,
            ),
            words=self._words.of(request.sampling),
            top_logprobs=request.top_logprobs,
            priority=request.priority,
            deadline=arrived + request.deadline_ms / 1e3 if request.deadline_ms else None,
            want_progress=request.want_progress,
            cache_salt="".join((adapter.salt if adapter else "", question_salt(questions), request.cache_salt)),
            adapter=adapter,
            tenant=request.tenant,
            boundaries=self._turn_starts.positions(ids) if is_chat else [],
            media=encoded.spans,
            left_out=encoded.left_out,
            positions=encoded.positions,
            relaxed=(*self._relaxed, *encoded.relaxed, *name_kept(len(ids), keep)),
            keep=keep,
            drafting=self._drafting(request, by_model=not keep),
            questions=questions,
        )
        check_limits(row.sampling, row.words, self._eos_ids, self._suppressed, self._vocab_size)
        if isinstance(request.prompt, ChatPrompt) and questions is None:
            row.text.parser, row.thinking.is_open = self._family.parser(
                request.prompt,
                text or "",
                self.is_restricted(request),
                id_seed=f"{request.rid}:{request.sampling.seed}",
            )
            row.thinking.budget = self._family.thinking_budget(request.prompt, request.thinking_budget)
            row.thinking.closing_ids = self._family.closing_ids
            row.text.is_one_call = request.prompt.one_call
        self.writer.replay(row, request.resume)
        self.recent.add(row, request.prompt, len(text or ""))
        return row

    def _vocabulary_of(self, request: Generate, *, is_chat: bool) -> Vocabulary:
        """Return the vocabulary that decodes the output. It hides special tokens unless the request shows them."""
        if request.shows_special:
            self._whole_vocabulary = self._whole_vocabulary or self.vocabulary.with_special()
            return self._whole_vocabulary
        return self._chat_vocabulary if is_chat else self.vocabulary

    def tokenize(self, request: Tokenize | Detokenize, is_wanted: Callable[[], bool]) -> Tokenized | None:
        """Count or decode tokens; return None as soon as the result is not wanted any more. Raises `RequestInvalid`."""
        match request:
            case Detokenize(rid, ids):
                self._check_count(ids, "tokens")
                return Tokenized(rid, len(ids), text=self.vocabulary.decode(ids))
            case Tokenize(rid, ChatPrompt() as prompt, want_text=True):
                return Tokenized(rid, 0, text=self._render(prompt))
            case Tokenize(rid, prompt, want_ids):
                count, ids = 0, list[int]()
                for part in self._parts(prompt):
                    if not is_wanted():
                        return None
                    count += len(part)
                    if want_ids:
                        ids += part
                if not count:
                    raise empty_prompt()
                return Tokenized(rid, count, tuple(ids))

    def _parts(self, prompt: Prompt) -> Iterable[Sequence[int]]:
        """Return the tokens of a prompt in parts; the prompt may be longer than the context."""
        match prompt:
            case TokensPrompt(ids):
                self._check_count(ids, "prompt")
                return [ids]
            case TextPrompt(text):
                pass
            case EmbedPrompt() | ScorePrompt() | TranscribePrompt() | SpeechPrompt():
                raise generates_text()
            case NextTurnPrompt():
                return [self._next_turns.encode(prompt)]
            case ChatPrompt() if prompt.media:
                ids = self._encode_media(prompt, lambda text, _: self._encode_counted(text, prompt)).ids
                self._check_count(ids, "messages")
                return [ids]
            case ChatPrompt():
                text = self._render(prompt)
        check_countable(text, _param(prompt), self.max_context)
        return self._encoder.slices(text, add_special_tokens=_adds_special(prompt))

    def _encode_counted(self, text: str, prompt: Prompt) -> list[int]:
        check_countable(text, _param(prompt), self.max_context)
        return self._encoder.encode(text, add_special_tokens=False)

    def _check_count(self, ids: Sequence[int], param: str) -> None:
        most = MAX_COUNTED_CONTEXTS * self.max_context
        if len(ids) > most:
            message = f"{param} has {len(ids)} token ids; at most {most} are taken at once."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)
        check_ids(ids, param, self._vocab_size)

    def is_restricted(self, request: Generate) -> bool:
        """Return whether a row needs `restrict` before it may run."""
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        return request.constraint is not None or (chat is not None and bool(chat.must_call or chat.strict_tools))

    def restrict(self, row: Row, request: Generate) -> None:
        """Set the rule for a row's output. May take seconds, so only threads that can wait call it. Raises
        `RequestInvalid`.

        Required calls override a format of the answer. If calls are optional, the output is either calls or an answer
        in the format.
        """
        chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
        if request.constraint is not None and not (chat is not None and chat.must_call):
            self.constrain(row, request.constraint, chat)
            return
        if chat is None:
            return
        room = row.max_tokens if request.max_tokens is not None else min(row.max_tokens, DEFAULT_CALL_TOKENS)
        row.rule = self._tool_rules.make(chat, self.vocabulary.decode(row.prompt[-_PROMPT_END_TOKENS:]), room)
        if chat.must_call and row.rule is not None:
            # Reasoning may use half of the answer's tokens, but none of the tokens that the call needs.
            row.thinking.closing_ids = self._family.calling_ids
            most = max(0, min(room // 2, room - row.rule.reserve - len(row.thinking.closing_ids)))
            row.thinking.budget = most if row.thinking.budget is None else min(row.thinking.budget, most)

    def constrain(self, row: Row, constraint: Constraint, chat: ChatPrompt | None = None) -> None:
        """Set the rule for a row's output, and for the calls of `chat`. May take seconds. Raises `RequestInvalid`."""
        has_tools = chat is not None and bool(chat.tools)
        needs_end = constraint.after_reasoning or has_tools
        prompt_end = self.vocabulary.decode(row.prompt[-_PROMPT_END_TOKENS:]) if needs_end else ""
        row.rule = self._rules.make(constraint, prompt_end, ignore_eos=row.sampling.ignore_eos)
        if chat is not None and has_tools:
            row.rule = self._tool_rules.optional(row.rule, constraint, chat, prompt_end)

    def _render(self, prompt: ChatPrompt) -> str:
        return self._renderer.render(self._family.with_effort(prompt))

    def _drafting(self, request: Generate, *, by_model: bool) -> Drafting:
        """Return the drafting options of a request.

        A prediction is cut to the length of the context. `by_model` is false for a sparse prompt, because the draft
        model would need the KV of tokens that sparse prefill skips.
        """
        most = UNLIMITED_DRAFT_TOKENS if request.most_drafted is None else request.most_drafted
        text = request.prediction[: self.max_context * MAX_CHARS_PER_TOKEN] if most else ""
        ids = self._encoder.encode(text, add_special_tokens=False)[: self.max_context] if text else []
        # A tokenizer may have more tokens than the model: no draft may contain such tokens, nor continue after them.
        known = tuple(token if token < self._vocab_size else BREAK for token in ids)
        return Drafting(most, known, request.cache_salt, by_model)

    def _adapter(self, name: str) -> Adapter | None:
        """Return the adapter that a request names. Raises `RequestInvalid`."""
        if not name:
            return None
        if self._adapters is None:
            raise RequestInvalid(Code.UNSUPPORTED, "This model is served without adapters.", param="model")
        return self._adapters.find(name)

    def _encode_fitting(self, request: Generate) -> EncodedPrompt:
        """Encode the prompt; truncate it to fit if the request allows truncation."""
        prompt, salt = request.prompt, request.cache_salt
        if not is_cut(request):
            return self._encode(prompt, salt)
        if isinstance(prompt, ChatPrompt) and not request.cuts_tokens:
            return fit_turns(request, prompt, self.max_context, lambda part: self._encode(part, salt, CONTEXTS))
        opening = self._encoder.opening if _adds_special(prompt) else 0
        return fit_tokens(request, self._encode(prompt, salt, CONTEXTS), opening, self.max_context)

    def _encode_asked(self, request: Generate) -> tuple[EncodedPrompt, RowQuestions]:
        """Encode a chat up to its questions, and the questions."""
        if not isinstance(request.prompt, ChatPrompt):
            raise RequestInvalid(Code.INVALID_REQUEST, "questions are asked about a chat", param="questions")
        prompt, rest = with_slot(request.prompt), ""

        def encode(text: str, placeholders: int) -> list[int]:
            nonlocal rest
            head, rest = self._questions.cut(text)
            return self._encode_beside(head, placeholders, prompt)

        if prompt.media:
            encoded = self._encode_media(prompt, encode, request.cache_salt)
        else:
            encoded = EncodedPrompt(encode(self._render(prompt), 0))
        check_ids(encoded.ids, "prompt", self._vocab_size)
        self._room(len(encoded.ids), request)
        tokens = len(encoded.ids)
        asked = self._questions.encode(request.questions, rest, tokens, encoded.spans, self.max_context)
        return encoded, asked

    def _encode(self, prompt: Prompt, salt: str, contexts: int = 1) -> EncodedPrompt:
        """Encode the prompt; refuse it early if it is far longer than this many contexts."""
        match prompt:
            case ChatPrompt():
                encoded = self._encode_chat(prompt, salt, contexts)
            case TextPrompt(text=text, infill=Infill() as infill):
                encoded = EncodedPrompt(self._encode_infill(text, infill, prompt))
            case TextPrompt(text=text):
                encoded = EncodedPrompt(self._encode_text(text, prompt, contexts), text)
            case TokensPrompt(ids=given):
                encoded = EncodedPrompt(list(given))
            case NextTurnPrompt():
                encoded = EncodedPrompt(self._next_turns.encode(prompt))
            case EmbedPrompt() | ScorePrompt() | TranscribePrompt() | SpeechPrompt():
                raise generates_text()
        if not encoded.ids:
            raise empty_prompt()
        check_ids(encoded.ids, "prompt", self._vocab_size)
        return encoded

    def _encode_chat(self, prompt: ChatPrompt, salt: str, contexts: int) -> EncodedPrompt:
        if not prompt.media:
            text = self._render(prompt)
            return EncodedPrompt(self._encode_text(text, prompt, contexts), text)

        def encode(text: str, placeholders: int) -> list[int]:
            return self._encode_beside(text, placeholders, prompt, contexts)

        return self._encode_media(prompt, encode, salt)

    def _encode_beside(self, text: str, placeholders: int, prompt: Prompt, contexts: int = 1) -> list[int]:
        """Encode the text of a prompt in which media take `placeholders` more tokens."""
        if placeholders >= contexts * self.max_context:
            raise self._too_long(placeholders, prompt, "at least ")
        return self._encode_text(text, prompt, contexts)

    def _encode_media(
        self, prompt: ChatPrompt, encode: Callable[[str, int], list[int]], salt: str = ""
    ) -> EncodedPrompt:
        if self._media is None:
            raise unserved(prompt.media[0], (), self.no_media)
        if len(prompt.media) > self._limits.count:
            most = self._limits.count
            message = f"The request has {len(prompt.media)} images, videos and audio clips; at most {most} are taken."
            raise RequestInvalid(Code.TOO_MANY_MEDIA, message, param=prompt.media[most].param or "messages")
        return self._media.encode(self._family.with_effort(prompt), encode, salt)

    def _encode_infill(self, prefix: str, infill: Infill, prompt: Prompt) -> list[int]:
        characters = sum(map(len, (prefix, infill.suffix, infill.middle, *(text for _, text in infill.files))))
        if characters > MAX_CHARS_PER_TOKEN * self.max_context:
            raise self._too_long(characters // MAX_CHARS_PER_TOKEN, prompt, "at least ")
        return self._infill.encode(prefix, infill)

    def _encode_text(self, text: str, prompt: Prompt, contexts: int) -> list[int]:
        add_special_tokens, most = _adds_special(prompt), contexts * self.max_context
        # The beginning of text that cannot fit is enough to refuse it; encoding megabytes would take seconds and
        # gigabytes.
        start = text[: MAX_CHARS_PER_TOKEN * most]
        if len(start) < len(text):
            at_least = len(self._encoder.encode(start, add_special_tokens=add_special_tokens))
            if at_least > most + _CUT_EXTRA_TOKENS:
                raise self._too_long(at_least, prompt, "at least ")
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    def _sampling(self, request: Generate) -> Sampling:
        """Return the sampling options of a row: a fill-in-the-middle answer also ends at tokens that begin another
        part.
        """
        prompt, sampling = request.prompt, request.sampling
        if not isinstance(prompt, TextPrompt) or prompt.infill is None or sampling.ignore_eos:
            return sampling
        return structs.replace(sampling, stop_ids=(*sampling.stop_ids, *self._infill.stop_ids))

    def _room(self, prompt_tokens: int, request: Generate) -> int:
        """Return the maximum number of tokens to generate: the requested number, or the rest of the context."""
        left = self.max_context - prompt_tokens
        # A prompt to which nothing is generated may take all of the context.
        if left < (request.max_tokens != 0 or bool(request.questions)):
            raise self._too_long(prompt_tokens, request.prompt)
        return left if request.max_tokens is None else min(left, request.max_tokens)

    def _too_long(self, tokens: int, prompt: Prompt, hedge: str = "") -> RequestInvalid:
        return RequestInvalid(
            Code.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {self.max_context} tokens. However, your request has "
            f"{hedge}{tokens} tokens of prompt. Please shorten it.",
            param=_param(prompt),
            numbers=(tokens, self.max_context),
        )


def _adds_special(prompt: Prompt) -> bool:
    return isinstance(prompt, TextPrompt) and prompt.adds_special


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
