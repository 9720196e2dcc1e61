"""Intake of generation requests: makes a `Row` of each `Generate`, on its own thread. A request's parameters, adapter,
prompt, limits and answer are prepared in this order, so the first fault in this order is reported.

MLX checks no bounds, so every token id that could reach it is checked before.

Rules of rows: the grammar of a request's format or tools, set on the row before it runs.

Control tokens of chats: those that begin messages, and the one with which a chat template ends an answer.
"""

import logging
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Final

from protocol.failures import Code
from protocol.from_worker import Tokenized
from protocol.spec import IMAGE_PIXELS_MAX
from protocol.to_worker import ChatPrompt, Constraint, Detokenize, Generate, NextTurnPrompt, Prompt, Tokenize
from worker.engine.output import OutputWriter
from worker.engine.row import PromptReport, Row, RowStats
from worker.errors import RequestInvalid
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import Adapter, Adapters, adapters_of
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.prompt.encode import PromptEncoder, WordIds
from worker.prompt.family import ModelFamily, families_of
from worker.prompt.infill import InfillPrompts
from worker.prompt.limits_and_truncation import (
    NO_SPARSE,
    ModelLimits,
    SparseLimits,
    check_sampling,
    empty_prompt,
    is_restricted,
)
from worker.prompt.media_prompt import open_media
from worker.prompt.miss_explainer import RecentPrompts
from worker.prompt.model_prompts import ModelPrompts
from worker.prompt.next_turn import NextTurnPrompts
from worker.prompt.questions import QuestionPrompts, question_salt
from worker.prompt.templates import Renderer
from worker.structured.row_constraint import Rules
from worker.structured.tool_rules import DEFAULT_CALL_TOKENS, ToolRules
from worker.vision.images import MediaLimits

log = logging.getLogger("mlxd.worker")

# Limits of a request's media if the worker's specification has none.
DEFAULT_LIMITS: Final = MediaLimits(bytes=32 << 20, count=64, pixels=IMAGE_PIXELS_MAX)
# Number of tokens at a prompt's end that are decoded to find whether the prompt ends inside reasoning.
_PROMPT_END_TOKENS: Final = 4096


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
        encoder, vocab_size, eos_ids = PromptEncoder(loaded.tokenizer), loaded.vocab_size, tuple(loaded.eos_ids)
        families = families_of(loaded, parser)
        self.media = open_media(loaded, encoder, limits or DEFAULT_LIMITS, memory_bytes, *families)
        opened, closed = self.media.renderer.probe()
        self._family = ModelFamily(loaded, opened, *families)
        self.vocabulary = self._family.vocabulary
        self.writer = OutputWriter(self.vocabulary, self._family.controls)
        self.recent = RecentPrompts()
        self.rules = RowRules(loaded, self._family)
        self._adapters = adapters_of(loaded.model)
        infill = InfillPrompts(loaded.tokenizer, encoder, vocab_size)
        next_turns = NextTurnPrompts(self.recent, self.writer, self._family)
        questions = QuestionPrompts(encoder, self._family.family, vocab_size)
        self._prompts = ModelPrompts(encoder, self.media, infill, next_turns, questions, vocab_size)
        self._words = WordIds(encoder, self.vocabulary, vocab_size)
        suppressed = tuple(loaded.vision.needs.suppressed) if loaded.vision is not None else ()
        rows = max(vocab_size, loaded.table_rows)
        self._limits = ModelLimits(vocab_size, rows, eos_ids, suppressed, infill.stop_ids, loaded.deviations, sparse)
        self._turn_starts = TurnStarts(encoder, opened[len(closed) :], self.vocabulary.hidden, suppressed)
        self.max_context = loaded.max_context
        warn_of_open_end(self.media.renderer, self._family.family, loaded.tokenizer, eos_ids)

    def limit_context(self, tokens: int) -> None:
        """Reduce the maximum length of a sequence to the length that memory allows."""
        if tokens < self.max_context:
            log.warning("memory limits the context to %d of %d tokens", tokens, self.max_context)
            self.max_context = tokens

    def row(self, request: Generate, arrived: float) -> Row:
        """Return a validated row. Its rule is set later, by `rules`. Raises `RequestInvalid`."""
        is_ruled, context = is_restricted(request), self.max_context
        check_sampling(request, self._limits.vocab_size, is_restricted=is_ruled)
        adapter = _adapter_of(self._adapters, request.adapter)
        prompt = self._prompts.of(request, context)
        words = self._words.of(request.sampling)
        limits = self._limits.of(request, prompt, words, context)
        text, thinking = self._family.answer(request, prompt.ids, prompt.text or "", is_ruled=is_ruled)
        row = Row(
            rid=request.rid,
            prompt=prompt.ids,
            sampling=limits.sampling,
            max_tokens=limits.max_tokens,
            text=text,
            stats=RowStats(arrived),
            report=PromptReport.of(request, prompt.ids, prompt.text, self.vocabulary),
            words=words,
            top_logprobs=request.top_logprobs,
            priority=request.priority,
            deadline=arrived + request.deadline_ms / 1e3 if request.deadline_ms else None,
            want_progress=request.want_progress,
            cache_salt=(adapter.salt if adapter else "") + question_salt(prompt.questions) + request.cache_salt,
            adapter=adapter,
            tenant=request.tenant,
            boundaries=self._turn_starts.positions(request.prompt, prompt.ids),
            media=prompt.spans,
            truncated=prompt.truncated,
            positions=prompt.positions,
            own_deviations=limits.deviations,
            keep=limits.keep,
            drafting=self._words.drafting(request, context, is_sparse=bool(limits.keep)),
            questions=prompt.questions,
            thinking=thinking,
        )
        self.writer.replay(row, request.resume)
        self.recent.add(row, request.prompt, len(prompt.text or ""))
        return row

    def tokenize(self, request: Tokenize | Detokenize, is_wanted: Callable[[], bool]) -> Tokenized | None:
        """Count or decode tokens; return None as soon as the result is not wanted any more. Raises `RequestInvalid`."""
        match request:
            case Detokenize(rid, ids):
                self._prompts.check_count(ids, "tokens", self.max_context)
                return Tokenized(rid, len(ids), text=self.vocabulary.decode(ids))
            case Tokenize(rid, ChatPrompt() as prompt, want_text=True):
                return Tokenized(rid, 0, text=self.media.renderer.render(prompt))
            case Tokenize(rid, prompt, want_ids):
                count, ids = 0, list[int]()
                for part in self._prompts.parts(prompt, self.max_context):
                    if not is_wanted():
                        return None
                    count += len(part)
                    if want_ids:
                        ids += part
                if not count:
                    raise empty_prompt()
                return Tokenized(rid, count, tuple(ids))


def _adapter_of(adapters: Adapters | None, name: str) -> Adapter | None:
    """Return the adapter that a request names. Raises `RequestInvalid`."""
    if not name:
        return None
    if adapters is None:
        raise RequestInvalid(Code.UNSUPPORTED, "This model is served without adapters.", param="model")
    return adapters.find(name)


class RowRules:
    """Rules of one model's rows. A grammar may take seconds to compile, so only threads that can wait call this."""

    def __init__(self, loaded: LoadedModel, family: ModelFamily) -> None:
        self._family = family
        token_bytes = family.vocabulary.token_bytes
        self._rules = Rules(loaded.tokenizer, family.family, loaded.vocab_size, loaded.eos_ids, token_bytes)
        self._tool_rules = ToolRules(self._rules, loaded.tokenizer, family.tool_family, loaded.eos_ids)

    def restrict(self, row: Row, request: Generate) -> None:
        """Set the rule for a row's output. Raises `RequestInvalid`.

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
        row.rule = self._tool_rules.make(chat, self._prompt_end(row), room)
        if chat.must_call and row.rule is not None:
            # Reasoning may use half of the answer's tokens, but none of the tokens that the call needs.
            row.thinking.closing_ids = self._family.calling_ids
            most = max(0, min(room // 2, room - row.rule.reserve - len(row.thinking.closing_ids)))
            row.thinking.budget = most if row.thinking.budget is None else min(row.thinking.budget, most)

    def constrain(self, row: Row, constraint: Constraint, chat: ChatPrompt | None = None) -> None:
        """Set the rule for a row's output, and for the calls of `chat`. Raises `RequestInvalid`."""
        has_tools = chat is not None and bool(chat.tools)
        prompt_end = self._prompt_end(row) if constraint.after_reasoning or has_tools else ""
        row.rule = self._rules.make(constraint, prompt_end, ignore_eos=row.sampling.ignore_eos)
        if chat is not None and has_tools:
            row.rule = self._tool_rules.optional(row.rule, constraint, chat, prompt_end)

    def _prompt_end(self, row: Row) -> str:
        return self._family.vocabulary.decode(row.prompt[-_PROMPT_END_TOKENS:])


class TurnStarts:
    """Finder of the control tokens that begin messages."""

    def __init__(
        self, encoder: PromptEncoder, generation_prompt: str, hidden: frozenset[int], suppressed: Collection[int]
    ) -> None:
        """`generation_prompt` is the text that a template adds before an answer. Its first control token begins each
        message; if it has none, all `hidden` tokens do. Tokens in `suppressed` stand for media."""
        first = encoder.encode(generation_prompt, add_special_tokens=False)[:1]
        self._tokens = (frozenset(first) & hidden or hidden) - set(suppressed)

    def positions(self, prompt: Prompt, ids: Sequence[int]) -> list[int]:
        """Return the positions of a chat's messages after the first token."""
        if not isinstance(prompt, ChatPrompt | NextTurnPrompt):
            return []
        return [at for at, token in enumerate(ids) if token in self._tokens and at > 0]


_WORD: Final = "word1"
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": _WORD},
    {"role": "user", "content": "y"},
]


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
