"""Rules of rows: the grammar of a request's format or tools, set on the row before it runs."""

from typing import Final

from protocol.to_worker import ChatPrompt, Constraint, Generate
from worker.engine.row import Row
from worker.model.loader import LoadedModel
from worker.prompt.family import ModelFamily
from worker.structured.row_constraint import Rules
from worker.structured.tool_rules import DEFAULT_CALL_TOKENS, ToolRules

# Number of tokens at a prompt's end that are decoded to find whether the prompt ends inside reasoning.
_PROMPT_END_TOKENS: Final = 4096


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
