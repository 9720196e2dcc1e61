"""Grammars that make a model call tools, in its family's own markup. Imports no MLX."""

from worker.structured.tool_grammar.build import (
    CallGrammar,
    Calls,
    call_grammar,
    has_calls,
    next_message,
    rest_of_call,
    strict_grammar,
)
from worker.structured.tool_grammar.heads import HEADS
from worker.structured.tool_grammar.lark import MarkupTokens

__all__ = [
    "HEADS",
    "CallGrammar",
    "Calls",
    "MarkupTokens",
    "call_grammar",
    "has_calls",
    "next_message",
    "rest_of_call",
    "strict_grammar",
]
