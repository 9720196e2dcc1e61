"""Parsers from generated text to events (reasoning, content and tool calls) for every model family. Imports no MLX."""

from worker.output.parsers.controls import NO_CONTROLS, Controls, is_markup
from worker.output.parsers.detect import detect_family, reasoning_end, start_in_reasoning
from worker.output.parsers.events import Event
from worker.output.parsers.families import ALIASES, FAMILIES, UnknownFamily, resolve
from worker.output.parsers.parser import Parser, call_ids, make_parser

__all__ = [
    "ALIASES",
    "FAMILIES",
    "NO_CONTROLS",
    "Controls",
    "Event",
    "Parser",
    "UnknownFamily",
    "call_ids",
    "detect_family",
    "is_markup",
    "make_parser",
    "reasoning_end",
    "resolve",
    "start_in_reasoning",
]
