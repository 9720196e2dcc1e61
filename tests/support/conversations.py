"""A tool-using chat whose answers are chosen by the test, for counting what of it a prefix cache finds again."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.support.engine import EngineHarness, Result

_HEAD = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- messages[0].content + '<|im_end|>\n' }}{%- set messages = messages[1:] %}{%- endif %}"""
_CALLS = r"""
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}"""

# History is never touched: the next prompt goes on from the last answer.
PLAIN = (
    _HEAD
    + r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}"""
    + _CALLS
    + r"""{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
# The generation prompt opens the reasoning, and no past answer keeps its own.
FORGETS_REASONING = (
    _HEAD
    + r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"""
    + _CALLS
    + r"""{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
)
# Answers since the last question of the user keep their reasoning; a new question rewrites all of them.
REWRITES_HISTORY = (
    _HEAD
    + r"""
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.query %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- m.content }}"""
    + _CALLS
    + r"""{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
)
TEMPLATES = {"plain": PLAIN, "forgets reasoning": FORGETS_REASONING, "rewrites history": REWRITES_HISTORY}

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
    for name in ("read", "write", "search")
]


def with_template(model: Path, folder: Path, template: str) -> Path:
    """The model with another chat template."""
    shutil.copytree(model, folder, copy_function=os.link)
    file = folder / "chat_template.jinja"
    file.unlink()
    file.write_text(template)
    return folder


@dataclass
class Turn:
    """One request of the chat. `seen` is what the model had seen at its end: prompt, answer and end token."""

    prompt: list[int]
    seen: list[int]
    result: Result


class Scripted:
    """A processor that makes a row say exactly these tokens."""

    def __init__(self, prompt_size: int, answer: list[int]) -> None:
        self._prompt_size = prompt_size
        self._answer = answer

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        # The step after the last token is computed ahead as well.
        at = min(int(context.shape[0]) - self._prompt_size, len(self._answer) - 1)
        return mx.where(mx.arange(logits.shape[-1])[None] == self._answer[at], 0.0, -mx.inf)


class Chat:
    """Ten requests of one conversation: each question leads to a tool call, its result to an answer."""

    def __init__(self, engine: EngineHarness, salt: str = "") -> None:
        self._engine = engine
        self._salt = salt
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "mira kato sen luto por vide anka tomi " * 4}
        ]

    def turns(self, questions: int = 5) -> Iterator[Turn]:
        for number in range(questions):
            self.messages.append({"role": "user", "content": f"{number} kato sen mira por vi de an?"})
            call = {"type": "function", "function": {"name": "read", "arguments": {"line": number}}}
            yield self._answer(f"{number} lu por vi", "mira to", [call])
            self.messages.append({"role": "tool", "content": f"{number} sen sen lu"})
            yield self._answer(f"{number} ka to", f"{number} de an por", [])

    def request(self, rid: int, max_tokens: int = 16) -> Generate:
        prompt = ChatPrompt(self.messages, TOOLS)
        return Generate(rid, prompt, Sampling(temperature=0.0), max_tokens=max_tokens, cache_salt=self._salt)

    def _answer(self, reasoning: str, content: str, calls: list[dict[str, Any]]) -> Turn:
        engine = self._engine
        request = self.request(len(engine.results) + 1, max_tokens=200)
        prompt = engine.intake.row(request, 0.0).prompt
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
        # What the plain template makes of the message is what a model of this kind says.
        tokenizer = engine.loaded.tokenizer
        opening = "" if tokenizer.decode(prompt).endswith("<think>\n") else "<think>\n"
        said = f"{opening}{reasoning}\n</think>\n\n{content}"
        for call in calls:
            number = call["function"]["arguments"]["line"]
            said += f'<tool_call>\n{{"name": "read", "arguments": {{"line": {number}}}}}\n</tool_call>'
        answer = tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
        result = engine.submit(request, processors=[Scripted(len(prompt), answer)])
        engine.wait(lambda: result.terminals, "the turn")
        assert result.ids == answer[:-1]
        self.messages.append(message)
        return Turn(prompt, [*prompt, *answer], result)
