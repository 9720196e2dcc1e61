"""Prompts of next turns: they begin as the next request of the client does, whatever the template makes of answers."""

from typing import Any

import pytest

from protocol.to_worker import ChatPrompt, Generate, NextTurnPrompt, Sampling, TextPrompt
from tests.support.engine import spec
from tests.support.processors import DEMO
from worker.errors import RequestInvalid
from worker.model.loader import load
from worker.prompt.intake import Intake

TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "What is the capital of Norway?"}]
THOUGHT = "<think>\nThe user asks.\n</think>\n\n"


@pytest.fixture(scope="module")
def intake() -> Intake:
    return Intake(load(spec(DEMO), lambda *_: None))


def answered(intake: Intake, prompt: ChatPrompt, output: str, rid: int = 7) -> list[int]:
    """Let a request have this output, and return the prompt of its next turn."""
    row = intake.row(Generate(rid, prompt, Sampling(seed=5), max_tokens=64), 0.0)
    row.output += intake._prompts.encoder.encode(output, add_special_tokens=False)
    return intake.row(Generate(rid + 1, NextTurnPrompt(rid, 5), Sampling(), max_tokens=0), 0.0).prompt


@pytest.mark.parametrize(
    ("tools", "output", "turn", "following"),
    [
        ([], THOUGHT + "Oslo.", {"content": "Oslo."}, {"role": "user", "content": "And of Sweden?"}),
        ([], "Oslo.", {"content": "Oslo."}, {"role": "user", "content": ""}),
        (
            [TOOL],
            THOUGHT + '<tool_call>\n{"name":"look",  "arguments":{"at": "é"}}\n</tool_call>',
            {
                "content": "",
                "reasoning_content": "The user asks.",
                "tool_calls": [{"function": {"name": "look", "arguments": {"at": "é"}}, "type": "function"}],
            },
            {"role": "tool", "content": "fog"},
        ),
    ],
    ids=["reasoning", "plain", "call"],
)
def test_it_is_the_beginning_of_the_prompt_that_the_client_sends_next(
    intake: Intake, tools: list[Any], output: str, turn: dict[str, Any], following: dict[str, Any]
) -> None:
    prompt = ChatPrompt(ASKED, tools, thinking=True)
    ids = answered(intake, prompt, output.removeprefix("<think>\n"))
    messages = [*ASKED, {"role": "assistant"} | turn, following]
    sent = intake.row(Generate(9, ChatPrompt(messages, tools, thinking=True), Sampling(), max_tokens=1), 0.0).prompt
    assert sent[: len(ids)] == ids
    # What is left is the message itself, and the opening of the next answer.
    assert len(sent) - len(ids) <= 16


@pytest.mark.parametrize(
    "prompt",
    [TextPrompt("Oslo"), ChatPrompt([*ASKED, {"role": "assistant", "content": "Os"}], continue_final=True)],
    ids=["text", "prefix of an answer"],
)
def test_a_sequence_that_is_no_whole_chat_has_none(intake: Intake, prompt: ChatPrompt | TextPrompt) -> None:
    intake.row(Generate(70, prompt, Sampling(), max_tokens=4), 0.0)
    for rid in (70, 71):
        with pytest.raises(RequestInvalid, match=f"request {rid} is not known"):
            intake.row(Generate(72, NextTurnPrompt(rid), Sampling(), max_tokens=0), 0.0)
