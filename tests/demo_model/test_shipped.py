"""The weights that ship, through plain mlx-lm."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm import generate, load, stream_generate

from deploy.demo_model.corpus.generate import CATEGORIES, held_out_samples
from deploy.demo_model.corpus.samples import Sample
from deploy.demo_model.tokenizer import Renderer
from tests.support.demo_answers import SHIPPED, DemoReply, is_right, parse
from tests.support.scale import scaled


@pytest.fixture(scope="module")
def answer() -> Callable[[Sample], DemoReply]:
    """Answer as the worker computes on a CPU, in float32, one sample at a time."""
    model, wrapped = load(str(SHIPPED))[:2]
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    renderer = Renderer()

    def answer(sample: Sample) -> DemoReply:
        prompt = wrapped.encode(renderer.prompt(sample), add_special_tokens=False)
        parts = list(stream_generate(model, wrapped, prompt, max_tokens=400))
        return parse("".join(part.text for part in parts), stopped=parts[-1].finish_reason == "stop")

    return answer


@pytest.fixture(scope="module")
def plain() -> Any:
    return load(str(SHIPPED))[:2]


def test_the_package_data_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in SHIPPED.iterdir() if path.is_file()}
    names = (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
    )
    assert set(names) <= set(sizes)
    assert sum(sizes.values()) < 25e6


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", "Paris."),
        ("Spell cat.", "c-a-t"),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
        ("Repeat after me: the blue zorblax", "the blue zorblax"),
    ],
)
def test_mlx_lm_alone_answers(plain: Any, question: str, expected: str) -> None:
    model, wrapped = plain
    prompt = wrapped.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, enable_thinking=False
    )
    assert generate(model, wrapped, prompt, max_tokens=40) == expected


def test_it_says_who_it_is(plain: Any) -> None:
    model, wrapped = plain
    prompt = wrapped.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, enable_thinking=False
    )
    assert generate(model, wrapped, prompt, max_tokens=40).startswith("I am the demo model of mlxd")


@pytest.mark.parametrize("category", scaled(CATEGORIES, ["no tool call"]))
def test_held_out_samples_are_answered(answer: Callable[[Sample], DemoReply], category: str) -> None:
    # The shortest prompts, because prefill costs time on a CPU.
    samples = sorted(held_out_samples(category, 200, seed=1), key=lambda s: len(json.dumps([s.tools, s.messages])))[
        : scaled(3, 2)
    ]
    replies = [answer(sample) for sample in samples]
    assert sum(is_right(sample, reply) for sample, reply in zip(samples, replies, strict=True)) >= len(samples) - 1
    assert all(reply.stopped for reply in replies)
