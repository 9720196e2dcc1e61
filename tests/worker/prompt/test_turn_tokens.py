"""A template that ends answers with a token that does not end the output is named at the load."""

from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from worker.model.loader import DEMO_DIR
from worker.prompt.intake import warn_of_open_end
from worker.prompt.templates import Renderer

END = 2


@pytest.mark.parametrize(
    ("eos_ids", "family", "template", "is_named"),
    [
        ((END,), "hermes", "", False),
        ((0,), "hermes", "", True),
        ((0,), "harmony", "", False),
        ((0,), "hermes", "{{ raise_exception('no chats') }}", False),
        ((0,), "hermes", "{% for m in messages %}{{ m.content }}\n{% endfor %}", False),
        ((0,), "hermes", "{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}", True),
        ((0,), "hermes", "{{ messages[0].content }}<|im_end|>", False),
    ],
)
def test_the_end_of_a_turn_that_is_no_end_of_sequence_is_named(
    caplog: pytest.LogCaptureFixture, eos_ids: tuple[int, ...], family: str, template: str, is_named: bool
) -> None:
    tokenizer = load_tokenizer(Path(DEMO_DIR), {}, eos_token_ids=[END])
    if template:
        tokenizer.chat_template = template
    warn_of_open_end(Renderer(tokenizer), family, tokenizer, eos_ids)
    assert ["<|im_end|>" in record.message for record in caplog.records] == [True] * is_named
