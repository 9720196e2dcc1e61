"""Adapter that comes with the demo model: its rows end as it was trained to, and those of the base stay as they are."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from deploy.demo_adapter.__main__ import ENDING, samples
from gateway.adapter_loads import allowed_path
from gateway.model_files.metadata import DEMO_ADAPTER, find
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.support.engine import EngineHarness, spec
from worker.model.loader import DEMO_DIR, resolve

QUESTIONS = ("What is the capital of France?", "Spell cat.", "Who are you?", "Count from 3 to 9.")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineHarness]:
    with EngineHarness(spec(Path("demo"), adapters=(("radio", DEMO_ADAPTER),))) as engine:
        yield engine


def asked(rid: int, question: str, adapter: str) -> Generate:
    prompt = ChatPrompt([{"role": "user", "content": question}])
    return Generate(rid, prompt, Sampling(temperature=0.0), max_tokens=80, adapter=adapter)


def test_both_sides_find_its_small_folder(tmp_path: Path) -> None:
    assert allowed_path(DEMO_ADAPTER, tmp_path, ()) == DEMO_ADAPTER
    assert find(DEMO_ADAPTER) == resolve(DEMO_ADAPTER)
    sizes = {file.name: file.stat().st_size for file in resolve(DEMO_ADAPTER).iterdir()}
    assert sizes.keys() == {"README.md", "adapter_config.json", "adapters.safetensors"}
    assert sum(sizes.values()) < 300_000


@pytest.mark.soak
def test_an_answer_ends_as_it_was_trained_to_beside_rows_of_the_base(engine: EngineHarness) -> None:
    rows = [
        asked(rid, question, name) for rid, (question, name) in enumerate(itertools.product(QUESTIONS, ("", "radio")))
    ]
    texts = [result.text for result in engine.run(rows)]
    base, adapted = texts[::2], texts[1::2]
    assert base[0] == "Paris."
    assert adapted == [text + ENDING for text in base]
    assert not any(text.endswith(ENDING) for text in base)


def test_what_it_learns_are_answers_with_the_ending_and_json_without() -> None:
    tokenizer = load_tokenizer(DEMO_DIR)
    learned = [tokenizer.decode(ids[before:]) for ids, before in itertools.islice(samples(tokenizer), 40)]
    end = tokenizer.eos_token
    plain = [text for text in learned if not text.endswith(ENDING + end)]
    assert 0 < len(plain) < 10
    assert all(text.rstrip().endswith(("}" + end, "]" + end)) for text in plain)
