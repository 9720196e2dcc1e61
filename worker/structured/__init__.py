"""Structured output: grammars, their masks and the rules of tool calls."""

__all__ = ["guides", "masks", "tool_grammar", "tool_rules"]
