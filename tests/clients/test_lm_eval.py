"""lm-eval's `local-completions` against the embedded model: it scores as the model itself does in one pass."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from gateway.config.settings import ModelConfig
from gateway.model_files.metadata import find
from tests.clients.conftest import Workshop
from tests.clients.install import pypi
from tests.gateway.harness import Gateway, serving

pytestmark = pytest.mark.anyio

# transformers for the tokenizer alone: no PyTorch is installed.
LM_EVAL: Final = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
QUESTIONS: Final = (
    ("What is the capital of France?", ("Paris.", "Rome.", "Berlin."), 0),
    ("What is the capital of Italy?", ("Paris.", "Rome.", "Madrid is the capital."), 1),
    ("What is the opposite of hot?", ("Warm.", "Cold.", "Blue."), 1),
    ("What is 2 + 3?", ("4.", "6.", "5."), 2),
)
TASK: Final = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "<|im_start|>user\\n{{{{question}}}}<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
CONTEXT: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture
async def demo() -> AsyncGenerator[Gateway, None]:
    async with serving(ModelConfig(name="demo", path="demo")) as started:
        yield started


async def test_multiple_choice_is_scored_as_by_the_model_itself(demo: Gateway, tmp_path: Path) -> None:
    python = pypi("lmeval", *LM_EVAL) / "python"
    folder = find("demo")
    data = tmp_path / "questions.jsonl"
    docs = [{"question": q, "choices": list(choices), "answer": at} for q, choices, at in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "capitals.yaml").write_text(TASK.format(data=data))
    options = f"model=demo,base_url={demo.url}/v1/completions,num_concurrent=3,tokenizer={folder}"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", options]
    command += ["--tasks", "capitals", "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"]
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "x"}
    said = await Workshop(demo, tmp_path, tmp_path, "").run(command, env)

    (samples,) = (tmp_path / "out").rglob("samples_capitals_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(QUESTIONS), said
    assert [line["acc"] for line in lines] == [1.0] * len(QUESTIONS)
    model, tokenizer, *_ = load(str(folder))
    for line in lines:
        expected = [_score(model, tokenizer, line["doc"]["question"], choice) for choice in line["doc"]["choices"]]
        told = [(float(logprob), str(is_greedy) == "True") for ((logprob, is_greedy),) in line["resps"]]
        assert [is_greedy for _, is_greedy in told] == [is_greedy for _, is_greedy in expected]
        assert [logprob for logprob, _ in told] == pytest.approx([logprob for logprob, _ in expected], abs=2e-2)


def _score(model: Any, tokenizer: Any, question: str, choice: str) -> tuple[float, bool]:
    """The log-probability of a choice behind its question, in one forward pass, and whether it is the likeliest."""
    context = tokenizer.encode(CONTEXT.format(question), add_special_tokens=False)
    whole = tokenizer.encode(CONTEXT.format(question) + choice, add_special_tokens=False)
    logits = model(mx.array([whole]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    places = range(len(context), len(whole))
    own = sum(logprobs[at - 1, whole[at]].item() for at in places)
    return own, all(mx.argmax(logprobs[at - 1]).item() == whole[at] for at in places)
