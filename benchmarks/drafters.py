"""Milliseconds that drafts take, by kind of drafter, rows and tokens of a draft: what a step must win back.

    python -m benchmarks.drafters --dtype bfloat16       # beside a target of Qwen3-8B's geometry
    python -m benchmarks.drafters --hidden 256 --vocab 4096 --rows 1,8       # small, for a CPU

Weights and hidden states are random, and no target runs: of it there are its tables, and states of as many tokens as a
step would leave. `head` is one layer, `dflash` five layers and a block, `draft model` a model of Qwen3-0.6B's geometry
with a context of 500 tokens.
"""

import argparse
import statistics
import time
from typing import Any, Final

from benchmarks.serve import numbers
from gateway.ctl.bench.closed_loop import table

DRAFTS: Final = (1, 3, 7, 15)
CONTEXT: Final = 500
# Number of new tokens before each draft: the newest token of the last step, and its accepted drafts.
NEW: Final = 3
PLACES: Final = (1, 9, 17, 25, 33)


def main() -> None:
    import mlx.core as mx

    args = _arguments()
    dtype = getattr(mx, args.dtype)
    print(f"hidden {args.hidden} · {args.dtype} · {mx.default_device()}")
    lines: list[tuple[str, ...]] = []
    target = _target(args.hidden, args.vocab, dtype)
    for kind, (proposer, size) in {
        "head": _head(target, args.hidden, args.vocab, dtype),
        "dflash": _block(target, args.hidden, args.vocab, dtype),
        "draft model": _model(args.hidden, args.vocab, dtype),
    }.items():
        for rows in args.rows:
            taken = _measured(proposer, size, dtype, rows, args.turns)
            lines.append((kind, str(rows), *(f"{1e3 * seconds:.2f}" if seconds else "-" for seconds in taken)))
            proposer.end()
            mx.clear_cache()
    print(table(("drafter", "rows", *(f"{count} tokens" for count in DRAFTS)), lines))


def _measured(proposer: Any, size: int, dtype: Any, rows: int, turns: int) -> list[float | None]:
    """Return the seconds of drafts of each length, made after a few new tokens of each row."""
    import mlx.core as mx
    import numpy as np

    from worker.speculation.draft_state import DraftState

    class Drafted:
        def __init__(self) -> None:
            self.draft = DraftState()

    proposer.begin(lambda _rows, logits, _ahead: mx.argmax(logits, axis=-1), lambda: ([], []))
    drafted, length = [Drafted() for _ in range(rows)], CONTEXT
    text = np.arange(CONTEXT + (turns + 3) * len(DRAFTS) * NEW + NEW, dtype=np.int32) % 1000
    seconds: list[float | None] = []

    def fed(count: int) -> None:
        nonlocal length
        if size:
            states = mx.random.normal((rows, count, size)).astype(dtype)
            mx.eval(states)
            proposer.capture.keep(
                (states,), [row.draft for row in drafted], [length - count] * rows, [count] * rows, [0] * rows
            )

    fed(CONTEXT)
    proposer.propose(drafted, [text[:length]] * rows, [5] * rows, 1)
    while proposer.unread:
        proposer.read(512)
    proposer.propose(drafted, [text[:length]] * rows, [5] * rows, 1)
    for count in DRAFTS:
        if count > proposer.longest:
            seconds.append(None)
            continue
        taken: list[float] = []
        for _ in range(turns + 2):
            length += NEW
            fed(NEW)
            began = time.perf_counter()
            drafts = proposer.propose(drafted, [text[:length]] * rows, [5] * rows, count)
            taken.append(time.perf_counter() - began)
            assert all(len(draft) == count for draft in drafts)
        seconds.append(statistics.median(taken[2:]))
    return seconds


def _target(hidden: int, vocab: int, dtype: Any) -> Any:
    """Make a target's tables and last norm; drafters use nothing else of the target."""
    import mlx.core as mx
    import mlx.nn as nn

    core, target = nn.Module(), nn.Module()
    core.embed_tokens, core.norm = nn.Embedding(vocab, hidden), nn.RMSNorm(hidden)
    core.layers = [nn.Identity() for _ in range(36)]
    target.model, target.lm_head = core, nn.Linear(hidden, vocab, bias=False)
    target.set_dtype(dtype)
    mx.eval(target.parameters())
    return target


def _settings(hidden: int, vocab: int) -> dict[str, Any]:
    """Return the settings of one layer as wide as Qwen3-8B's, or narrower."""
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 1,
        "num_attention_heads": hidden // 128, "num_key_value_heads": max(1, hidden // 512), "head_dim": 128,
        "rms_norm_eps": 1e-6, "vocab_size": vocab, "max_position_embeddings": 40960, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _head(target: Any, hidden: int, vocab: int, dtype: Any) -> tuple[Any, int]:
    import mlx.core as mx
    from mlx_lm.models import qwen3

    from worker.speculation.drafters.mtp_and_eagle_heads import QWEN, PredictionHead
    from worker.speculation.drafters.state_drafts import HeadDrafts

    layer = qwen3.TransformerBlock(qwen3.ModelArgs.from_dict(_settings(hidden, vocab)))
    head = PredictionHead(layer, hidden, 1e-6, QWEN)
    head.set_dtype(dtype)
    mx.eval(head.parameters())
    head.bind(target.model.embed_tokens, target.lm_head, target.model.norm)
    return HeadDrafts(head, dtype), hidden


def _block(target: Any, hidden: int, vocab: int, dtype: Any) -> tuple[Any, int]:
    import mlx.core as mx
    from mlx_vlm.speculative.drafters.qwen3_dflash import Model, ModelConfig

    from worker.speculation.drafters.block_head import BlockDrafts, BlockHead

    places = {"mask_token_id": 7, "target_layer_ids": list(PLACES), "num_target_layers": 36}
    settings = _settings(hidden, vocab) | {"num_hidden_layers": 5, "block_size": 16, "dflash_config": places}
    model = Model(ModelConfig.from_dict(settings))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return BlockDrafts(BlockHead(model, target, vocab), hidden, dtype), hidden * len(PLACES)


def _model(hidden: int, vocab: int, dtype: Any) -> tuple[Any, int]:
    import mlx.core as mx
    from mlx_lm.models import qwen3

    from worker.speculation.drafters.model_drafts import ModelDrafts

    small = _settings(max(128, hidden // 4), vocab) | {"num_hidden_layers": 28 if hidden >= 1024 else 4}
    if hidden >= 4096:
        small |= {"num_attention_heads": 16, "num_key_value_heads": 8}
    model = qwen3.Model(qwen3.ModelArgs.from_dict(small))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return ModelDrafts(model, vocab, vocab), 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="width of the target (default: 4096)")
    parser.add_argument("--vocab", type=int, default=151936, help="its tokens (default: 151936)")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="rows (default: 1,8,32)")
    parser.add_argument("--dtype", default="float32", help="of all weights (default: float32)")
    parser.add_argument("--turns", type=int, default=10, help="of each measurement (default: 10)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
