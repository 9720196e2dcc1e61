"""Structured output: grammars, their masks and the rules of tool calls."""
