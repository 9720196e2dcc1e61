"""Prompts with questions: where an answer begins, and which labels can be told apart."""

import pytest

from protocol.to_worker import ChatPrompt
from worker.prompt.family import answer_opening
from worker.prompt.questions import with_slot

FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("family", "rendered", "opening"),
    [
        ("none", "user: x\nassistant:", ""),
        ("hermes", "<|im_start|>assistant\n", ""),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("hermes", "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
        ("harmony", "<|end|><|start|>assistant", "<|channel|>final<|message|>"),
        ("harmony", "<|end|><|start|>assistant<|channel|>analysis<|message|>", f"<|end|>{FINAL}"),
        ("harmony", f"<|end|>{FINAL}", ""),
        ("harmony", "<|end|>", FINAL),
    ],
)
def test_the_next_token_is_the_first_of_the_answer(family: str, rendered: str, opening: str) -> None:
    assert answer_opening(family, rendered) == opening


def test_the_slot_is_at_the_end_of_the_users_last_message() -> None:
    user, called = {"role": "user", "content": "x"}, {"role": "tool", "content": "y"}
    image = {"role": "user", "content": [{"type": "image", "media": 0}]}
    (one,) = with_slot(ChatPrompt([user])).messages
    assert one["content"].startswith("x\n\n")
    (_, seen) = with_slot(ChatPrompt([called, image])).messages
    assert [part["type"] for part in seen["content"]] == ["image", "text"]
    turns = with_slot(ChatPrompt([user, called])).messages
    assert [turn["role"] for turn in turns] == ["user", "tool", "user"]
    assert user == {"role": "user", "content": "x"}
