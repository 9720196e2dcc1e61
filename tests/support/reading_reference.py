"""Numbers of sentence-transformers for the tiny models of `reading_models.py`, as a file of the tests.

Two steps, because torch is no dependency of mlxd: `python -m tests.support.reading_reference build FOLDER` writes the
models, and, where torch and sentence-transformers are installed,
`python tests/support/reading_reference.py compute FOLDER > tests/worker/embedding/reference.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

QUERY = "kato mira"


def build(folder: Path) -> None:
    """Write all models, and the texts that `compute` reads."""
    from tests.support.reading_models import EMBEDDERS, PAIRS, RERANKERS, TEXTS, build_embedder, build_reranker

    for family in EMBEDDERS:
        build_embedder(family, folder / "embed" / family)
    for family in RERANKERS:
        build_reranker(family, folder / "rerank" / family)
    (folder / "inputs.json").write_text(json.dumps({"texts": TEXTS, "pairs": PAIRS}))


def compute(folder: Path) -> dict[str, Any]:
    """Vectors of each text alone and of a query with its prompt, and the score of each pair."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    inputs = json.loads((folder / "inputs.json").read_text())
    embed: dict[str, Any] = {}
    for path in sorted((folder / "embed").iterdir()):
        model = SentenceTransformer(str(path), device="cpu")
        embed[path.name] = {
            "texts": [model.encode(text).tolist() for text in inputs["texts"]],
            "query": model.encode(QUERY, prompt_name="query").tolist(),
        }
    rerank: dict[str, Any] = {}
    for path in sorted((folder / "rerank").iterdir()):
        if path.name == "qwen3":
            rerank[path.name] = [_judge(path, *pair) for pair in inputs["pairs"]]
            continue
        scorer = CrossEncoder(str(path), device="cpu")
        rerank[path.name] = [float(scorer.predict([pair])[0]) for pair in inputs["pairs"]]
    return {"embed": embed, "rerank": rerank}


def _judge(path: Path, query: str, document: str) -> float:
    """As the model card of Qwen3-Reranker has it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for part in (before, text, after) for token in tokenizer.encode(part, add_special_tokens=False)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    return float(torch.softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1])


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        print(json.dumps(compute(Path(sys.argv[2]))))
