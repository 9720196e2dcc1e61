"""The kind of a model is told by its files, and by the name of its repository where the files of kinds are alike."""

import pytest

from protocol.checkpoint import EMBED, RERANK, TEXT, kind_of

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("org/Qwen3-Embedding-0.6B", EMBED),
        ("org/Qwen3-Reranker-0.6B/", RERANK),
        ("org/Qwen3-0.6B", TEXT),
        ("org/embedded-c-coder", TEXT),
        ("/embed/Qwen3-0.6B", TEXT),
        (f"/hub/models--org--Qwen3-Embedding-0.6B/snapshots/{SHA}", EMBED),
        (f"/hub/models--org--Qwen3-Reranker-0.6B/snapshots/{SHA}/", RERANK),
        (f"/hub/models--embed--Qwen3-0.6B/snapshots/{SHA}", TEXT),
        (f"/hub/models--gpt2/snapshots/{SHA}", TEXT),
    ],
)
def test_decoders_that_embed_or_score_are_told_by_the_name_of_their_repository(name: str, kind: str) -> None:
    assert kind_of({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, (), name) == kind


def test_files_of_sentence_transformers_tell_the_kind_under_any_name() -> None:
    assert kind_of({"model_type": "qwen3"}, ("modules.json",), "org/chat") == EMBED
    assert kind_of({"architectures": ["BertForSequenceClassification"]}, (), "org/chat") == RERANK
