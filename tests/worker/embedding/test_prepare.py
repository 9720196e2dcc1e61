"""Requests for vectors and scores as jobs: prompts, cuts, and what is refused before MLX sees it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.checkpoint import EMBED, RERANK
from protocol.failures import Code
from protocol.to_worker import (
    ChatPrompt,
    Detokenize,
    EmbedPrompt,
    Generate,
    Prompt,
    Sampling,
    ScorePrompt,
    TextPrompt,
    Tokenize,
    TokensPrompt,
)
from tests.support.engine import spec
from tests.support.reading_models import PROMPTS, build_embedder, build_reranker
from worker.embedding.intake_and_loop import Preparer
from worker.embedding.load_model import EmbeddingJob, load_embedding_model
from worker.errors import LoadFailed, RequestInvalid

Made = Callable[..., EmbeddingJob]
LONG = "kato " * 400


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    path = build_embedder("bert", tmp_path_factory.mktemp("bert"))
    return Preparer(load_embedding_model(spec(path), EMBED, lambda *_: None))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    path = build_reranker("bert", tmp_path_factory.mktemp("scorer"))
    return Preparer(load_embedding_model(spec(path), RERANK, lambda *_: None))


def job(preparer: Preparer, prompt: Prompt) -> EmbeddingJob:
    return preparer.job(Generate(1, prompt, Sampling(), deadline_ms=1500), 10.0)


def ids(preparer: Preparer, prompt: Prompt) -> list[tuple[int, ...]]:
    return [item.ids for item in job(preparer, prompt).items]


def refused(preparer: Preparer, prompt: Prompt) -> tuple[Code, str | None, str]:
    with pytest.raises(RequestInvalid) as caught:
        job(preparer, prompt)
    failure = caught.value.failure
    return failure.code, failure.param, failure.message


def test_a_text_is_encoded_with_its_prompt_and_ids_are_taken_as_they_are(embedder: Preparer) -> None:
    plain = ids(embedder, EmbedPrompt(("kato", (5, 6, 7))))
    assert plain[1] == (5, 6, 7)
    asked = ids(embedder, EmbedPrompt((PROMPTS["query"] + "kato",)))
    assert ids(embedder, EmbedPrompt(("kato",), prompt_name="query")) == asked
    assert ids(embedder, EmbedPrompt(("kato",), is_query=True)) == asked != plain[:1]
    told = ids(embedder, EmbedPrompt(("kato",), is_document=True))
    assert told == ids(embedder, EmbedPrompt((PROMPTS["document"] + "kato",)))


def test_a_job_knows_its_deadline_and_takes_the_longest_item_first(embedder: Preparer) -> None:
    made = job(embedder, EmbedPrompt(("kato", "kato " * 9, "kato kato")))
    assert made.deadline == 11.5
    assert made.left == [1, 2, 0]
    assert made.tokens == sum(len(item.ids) for item in made.items)


def test_a_prompt_that_the_model_lacks_is_refused_with_those_that_it_has(embedder: Preparer) -> None:
    code, param, message = refused(embedder, EmbedPrompt(("a",), prompt_name="passage"))
    assert (code, param) == (Code.INVALID_REQUEST, "prompt_name")
    assert "document, query" in message


@pytest.mark.parametrize("token", [-1, 516, 1 << 40])
def test_an_id_outside_of_the_vocabulary_is_refused(embedder: Preparer, token: int) -> None:
    code, param, message = refused(embedder, EmbedPrompt(("a", (3, token))))
    assert (code, param) == (Code.INVALID_REQUEST, "input[1]")
    assert f"token id {token}" in message


def test_an_input_that_is_too_long_is_refused_or_cut(embedder: Preparer) -> None:
    code, param, message = refused(embedder, EmbedPrompt(("a", LONG)))
    assert (code, param) == (Code.CONTEXT_LENGTH_EXCEEDED, "input[1]")
    assert "120 tokens" in message
    first, *_, last = whole = ids(embedder, EmbedPrompt((LONG,), truncate=-1))[0]
    assert len(whole) == 120
    assert ids(embedder, EmbedPrompt((LONG,), truncate=7))[0] == (*whole[:6], last)
    assert ids(embedder, EmbedPrompt((tuple(range(9)),), truncate=4)) == [(0, 1, 2, 3)]
    assert first == ids(embedder, EmbedPrompt(("a",)))[0][0]


def test_text_of_few_tokens_and_many_characters_is_whole(embedder: Preparer) -> None:
    """More characters than tokens could need is no reason to leave any of them out."""
    text = "a" + " " * 3000
    longest = 120 * 40
    assert ids(embedder, EmbedPrompt(("kato",)))
    code, _, message = refused(embedder, EmbedPrompt((text[:longest],)))
    assert code is Code.CONTEXT_LENGTH_EXCEEDED
    assert "at least" in message


def test_vectors_are_only_cut_where_the_model_declares_it(embedder: Preparer, tmp_path: Path) -> None:
    assert refused(embedder, EmbedPrompt(("a",), dimensions=33))[:2] == (Code.INVALID_REQUEST, "dimensions")
    assert refused(embedder, EmbedPrompt(("a",), dimensions=8))[:2] == (Code.UNSUPPORTED, "dimensions")
    assert job(embedder, EmbedPrompt(("a",), dimensions=32)).dimensions == 0
    declared = build_embedder("bert", tmp_path / "m", matryoshka_dimensions=[8, 16])
    for path, settings in ((declared, {}), (build_embedder("bert", tmp_path / "n"), {"matryoshka": True})):
        preparer = Preparer(load_embedding_model(spec(path, **settings), EMBED, lambda *_: None))
        assert job(preparer, EmbedPrompt(("a",), dimensions=8)).dimensions == 8


def test_an_answer_that_no_frame_could_hold_is_refused(embedder: Preparer) -> None:
    many = ((1,),) * (48 * 1024 * 1024 // (4 * 32) + 1)
    assert refused(embedder, EmbedPrompt(many))[:2] == (Code.INVALID_REQUEST, "input")


def test_other_kinds_of_requests_are_told_where_to_go(embedder: Preparer, scorer: Preparer) -> None:
    for prompt in (TextPrompt("a"), ChatPrompt([{"role": "user", "content": "a"}]), ScorePrompt(("a",), ("b",))):
        code, param, message = refused(embedder, prompt)
        assert (code, param) == (Code.UNSUPPORTED, "model")
        assert "/v1/embeddings" in message
    assert "/v1/rerank" in refused(scorer, EmbedPrompt(("a",)))[2]


def test_pairs_share_one_query_and_only_documents_are_cut(scorer: Preparer) -> None:
    both = job(scorer, ScorePrompt(("kato",), ("mira", "lu"))).items
    apart = job(scorer, ScorePrompt(("kato", "kato"), ("mira", "lu"))).items
    assert both == apart
    assert both[0].types[0] == 0
    assert both[0].types[-1] == 1
    short = job(scorer, ScorePrompt(("kato",), ("mira " * 9,), truncate_document=3)).items[0]
    assert len(short.ids) < len(job(scorer, ScorePrompt(("kato",), ("mira " * 9,))).items[0].ids)
    cut = job(scorer, ScorePrompt(("kato mira",), (LONG,), truncate=-1)).items[0]
    assert len(cut.ids) == 160
    start = job(scorer, ScorePrompt(("kato mira",), ("a",))).items[0].ids
    assert cut.ids[: len(start) - 2] == start[: len(start) - 2]


def test_pairs_that_cannot_be_made_are_refused(scorer: Preparer) -> None:
    assert refused(scorer, ScorePrompt(("a", "b"), ("c",) * 3, params=("text_1", "text_2")))[1] == "text_1"
    assert refused(scorer, ScorePrompt(("a",), ("b", LONG)))[:2] == (Code.CONTEXT_LENGTH_EXCEEDED, "documents[1]")
    assert refused(scorer, ScorePrompt(("a",), ("b",), instruction="judge"))[:2] == (Code.UNSUPPORTED, "instruction")


def test_tokens_are_counted_and_decoded(embedder: Preparer) -> None:
    counted = embedder.tokenize(Tokenize(4, TextPrompt("kato mira"), True), lambda: True)
    assert counted is not None
    assert counted.ids == ids(embedder, EmbedPrompt(("kato mira",)))[0]
    decoded = embedder.tokenize(Detokenize(5, counted.ids[1:-1]), lambda: True)
    assert decoded is not None
    assert decoded.text == "kato mira"
    with pytest.raises(RequestInvalid):
        embedder.tokenize(Tokenize(6, TokensPrompt((9999,))), lambda: True)


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("modules.json", [{"idx": 0, "type": "x.Transformer", "path": ""}, {"idx": 1, "type": "x.CNN"}], "'CNN'"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "leaves prompts out"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "no way of pooling"),
    ],
)
def test_steps_that_are_not_known_end_the_load(tmp_path: Path, file: str, change: object, reason: str) -> None:
    path = build_embedder("bert", tmp_path / "m")
    (path / file).write_text(json.dumps(change))
    with pytest.raises(LoadFailed, match=reason) as caught:
        load_embedding_model(spec(path), EMBED, lambda *_: None)
    assert caught.value.failure.code is Code.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([{"idx": "first", "type": "x.Transformer", "path": ""}], "idx is no number"),
        ([{"idx": 0, "type": "x.Transformer", "path": ""}, {"idx": 1, "type": "x.Normalize", "path": ""},
          {"idx": 2, "type": "x.Dense", "path": "2_Dense"}], "Dense behind Normalize"),
        ([{"idx": 0, "type": "x.Transformer", "path": ""}, {"idx": 1, "type": "x.Dense", "path": "3_Dense"}],
         "takes vectors of 64 numbers, and gets 32"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit_together_end_the_load(tmp_path: Path, modules: object, reason: str) -> None:
    path = build_embedder("gemma3_text", tmp_path / "m")
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadFailed, match=reason):
        load_embedding_model(spec(path), EMBED, lambda *_: None)


def test_a_broken_layer_behind_the_transformer_is_an_error_of_the_load(tmp_path: Path) -> None:
    path = build_embedder("gemma3_text", tmp_path / "m")
    (path / "2_Dense" / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(LoadFailed, match=r"2_Dense/model\.safetensors cannot be read") as caught:
        load_embedding_model(spec(path), EMBED, lambda *_: None)
    assert caught.value.failure.code is Code.MODEL_CORRUPT


@pytest.mark.parametrize("is_lowercased", [True, False])
def test_inputs_are_made_lower_case_where_the_model_was_trained_so(tmp_path: Path, is_lowercased: bool) -> None:
    path = build_embedder("bert", tmp_path / "m")
    (path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": is_lowercased}))
    preparer = Preparer(load_embedding_model(spec(path), EMBED, lambda *_: None))
    upper, lower = (ids(preparer, EmbedPrompt((text,), prompt_name="query")) for text in ("KaTo", "kato"))
    assert (upper == lower) is is_lowercased


@pytest.mark.parametrize("kind", ["Transformer", "Pooling", "Dense"])
@pytest.mark.parametrize("outside", ["../other", "1_Pooling/../../other", "ABSOLUTE"])
def test_a_step_outside_of_the_models_folder_is_refused(tmp_path: Path, kind: str, outside: str) -> None:
    path, other = build_embedder("bert", tmp_path / "m"), tmp_path / "other"
    shutil.copytree(path, other)
    shutil.copy(path / "1_Pooling" / "config.json", other / "config.json")
    named = str(other) if outside == "ABSOLUTE" else outside
    (path / "modules.json").write_text(json.dumps([{"idx": 0, "type": f"x.{kind}", "path": named}]))
    with pytest.raises(LoadFailed, match="outside of the model") as caught:
        load_embedding_model(spec(path), EMBED, lambda *_: None)
    assert caught.value.failure.code is Code.MODEL_CORRUPT


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("bert", {"hidden_act": "mish"}, "'mish' is not known"),
        ("bert", {"position_embedding_type": "relative_key"}, "absolute positions"),
        ("nomic_bert", {"num_experts": 8}, "without experts"),
        ("qwen3", {"is_causal": False}, "sees all of its input at once"),
    ],
)
def test_an_architecture_that_is_not_known_ends_the_load(
    tmp_path: Path, family: str, change: dict[str, object], reason: str
) -> None:
    with pytest.raises(LoadFailed, match=reason):
        load_embedding_model(spec(build_embedder(family, tmp_path / "m", **change)), EMBED, lambda *_: None)


def test_a_classifier_of_several_classes_is_no_reranker(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="one score"):
        load_embedding_model(spec(build_reranker("bert", tmp_path / "m", num_labels=3)), RERANK, lambda *_: None)
