"""The model builder, on a model of a few thousand weights."""

import hashlib
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks import models
from benchmarks.bare import Order, obey
from benchmarks.words import TokenPrompts
from gateway.ctl.bench.closed_loop import vocabulary

TINY = models.Geometry(layers=2, hidden=32, ffn=64, heads=2, kv_heads=1, head_dim=16, vocab=700, tokenizer_vocab=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    models.write(folder, TINY, "float32")
    return folder


def test_mlx_lm_loads_the_model_and_rows_generate_exactly_what_is_asked_for(folder: Path) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))[:2]
    prompts = TokenPrompts(tokenizer, seed=0).many([20] * 5)
    answer = obey(model, tokenizer, Order(prompts, max_tokens=[33] * 5, concurrency=2))
    assert [len(times) for times in answer.token_s] == [33] * 5
    assert answer.tokens == 165
    assert all(text.isascii() and len(text.split()) for text in answer.texts)


def test_a_late_prompt_is_inserted_after_the_tokens_named(folder: Path) -> None:
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(folder))[:2]
    order = Order(["a b", "c d"], max_tokens=[12, 12], concurrency=2, late="e f", late_after=10, late_max_tokens=3)
    answer = obey(model, tokenizer, order)
    assert [len(times) for times in answer.token_s] == [12, 12, 3]
    assert sum(time <= answer.inserted_s[2] for times in answer.token_s[:2] for time in times) >= 10


def test_prompts_are_exactly_as_long_as_asked_and_share_no_beginning(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = TokenPrompts(tokenizer, seed=0).many([1, 2, 5, 50, 205])
    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == [1, 2, 5, 50, 205]
    assert len({prompt.split()[0] for prompt in TokenPrompts(tokenizer, seed=1).many([205] * 8)}) == 8
    assert TokenPrompts(tokenizer, seed=0).many([50, 50]) == TokenPrompts(tokenizer, seed=0).many([50, 50])
    assert TokenPrompts(tokenizer, seed=4).make(50) != TokenPrompts(tokenizer, seed=-4).make(50)


def test_a_llama_of_random_weights_is_built_like_a_qwen(tmp_path: Path) -> None:
    import mlx_lm

    models.write(tmp_path, structs.replace(TINY, architecture="llama", tied=False), "bfloat16")
    model, tokenizer = mlx_lm.load(str(tmp_path))[:2]
    answer = obey(model, tokenizer, Order(["a b", "c"], [9, 4], concurrency=2))

    assert model.model_type == "llama"
    assert [len(times) for times in answer.token_s] == [9, 4]


def test_the_same_recipe_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    models.write(tmp_path, TINY, "float32")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert _digest(tmp_path / name) == _digest(folder / name), name


def test_a_model_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.GEOMETRIES, "tiny", TINY)
    first = models.build("tiny", root=tmp_path)
    written = (first / "config.json").stat().st_mtime_ns
    assert models.build("tiny", root=tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_invented_words_differ() -> None:
    assert len(set(vocabulary())) == len(vocabulary())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
