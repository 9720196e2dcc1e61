"""The whole recipe in small, on a CPU."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch, which mlxd itself does not")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from deploy.demo_model.train import tokenizer
    from deploy.demo_model.train import training as train

    out = tmp_path_factory.mktemp("smoke")
    bpe = tokenizer.train(train.corpus(train.SMOKE.corpus_samples), train.SMOKE.vocabulary)
    torch.manual_seed(0)
    model = train.Qwen3(train.SMOKE)
    train.fit(model, bpe, train.SMOKE, "cpu", 0)
    train.save(model, bpe, train.SMOKE, out)
    return out


def test_mlx_lm_loads_and_runs_what_a_smoke_training_writes(folder: Path) -> None:
    from mlx_lm import generate, load

    model, wrapped = load(str(folder))[:2]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    assert isinstance(generate(model, wrapped, "<|im_start|>user\nhi<|im_end|>\n", max_tokens=4), str)


def test_torch_and_mlx_compute_the_same_logits(folder: Path) -> None:
    import mlx.core as mx
    import numpy as np
    from mlx_lm import load
    from safetensors.torch import load_file

    from deploy.demo_model.train import training as train

    model, _ = load(str(folder))[:2]
    ids = list(range(40, 60))
    twin = train.Qwen3(train.SMOKE)
    twin.load_state_dict(
        {name.removeprefix("model."): w.float() for name, w in load_file(folder / "model.safetensors").items()}
    )
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
    wanted = torch.tensor([*ids[1:], train.IGNORED])
    loss = twin(torch.tensor(ids), torch.arange(len(ids)), offsets, wanted).item()
    logits = np.array(model(mx.array([ids])).astype(mx.float32))[0]
    logged = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert loss == pytest.approx(-np.mean([logged[i, ids[i + 1]] for i in range(len(ids) - 1)]), abs=1e-3)


def test_only_the_assistants_words_are_learned() -> None:
    import numpy as np

    from deploy.demo_model.corpus import generate
    from deploy.demo_model.train import tokenizer
    from deploy.demo_model.train import training as train

    renderer = tokenizer.Renderer()
    texts = [renderer.conversation(generate.training_sample(1, 0, n)) for n in range(200)]
    bpe = tokenizer.train(texts, 600)
    marks = {mark: bpe.token_to_id(mark) for mark in (*tokenizer.SPECIAL, *tokenizer.MARKS)}
    marks["assistant"] = bpe.encode("<|im_start|>assistant\n").ids[1]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n"
    ids = np.array(bpe.encode(text).ids)
    wanted = train.targets(ids, marks, last_only=False)
    assert (
        bpe.decode([t for t in wanted.tolist() if t != train.IGNORED], skip_special_tokens=False) == "Hello<|im_end|>"
    )
