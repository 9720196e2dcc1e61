"""mlx-lm's own numbers for a paragraph of plain English, beside which the engine's numbers are put."""

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import load

from protocol.spec import WorkerSpec
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.loader import cast, folded_config, read_config, resolve

PARAGRAPH: Final = (
    "The lighthouse keeper rose before dawn and climbed the stairs with a can of oil in each hand. For thirty years he "
    "had counted the steps, although he knew that there were one hundred and twelve of them. At the top he trimmed the "
    "wick, wiped the salt from the glass, and looked out over the water. A fishing boat was coming home along the "
    "coast, low in the waves, with gulls behind it. He lifted his arm, and somebody on the deck waved back. Then the "
    "sun came up, the lamp was no longer needed, and he went down to the kitchen to make coffee. His daughter had left "
    "a letter on the table. She wrote that the new light would work without a keeper, that a machine would turn it on "
    "and off, and that he could come to live with her in the city whenever he liked. He read it twice, folded it, and "
    "put it into the drawer with the others."
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Token ids of the paragraph and its perplexity, by mlx-lm. Without a perplexity there is a `reason`.

    `source` says whose: mlx-lm's classes ignore some keys of config.json, such as a rotary embedding in the form of
    another version. They then get the configuration as mlxd reads it.
    """

    ids: tuple[int, ...] = ()
    perplexity: float | None = None
    reason: str = ""
    source: str = "mlx-lm alone"


def reference_of(spec: WorkerSpec) -> Reference:
    """Load a model by mlx-lm alone, with the numbers' type of `spec`, run one forward pass, and free the model."""
    try:
        path = resolve(spec.path)
        config = read_config(path)
        folded = folded_config(config)
        with checkpoint_view(path, {CONFIG: folded}) if folded != config else nullcontext(path) as view:
            model, tokenizer = load(
                str(view),
                tokenizer_config={"trust_remote_code": spec.trust_remote_code},
                trust_remote_code=spec.trust_remote_code,
            )[:2]
        cast(model, spec.dtype)
        ids = [int(token) for token in tokenizer.encode(PARAGRAPH)]
        source = "mlx-lm alone" if folded == config else "mlx-lm with config.json as mlxd reads it"
        return Reference(tuple(ids), perplexity(_logprobs(model, ids)), source=source)
    except Exception as error:  # any error of a model that mlx-lm does not run
        return Reference(reason=f"mlx-lm does not run it: {type(error).__name__}: {error}".splitlines()[0][:200])
    finally:
        model = tokenizer = None
        gc.collect()
        mx.clear_cache()


def perplexity(logprobs: Sequence[float]) -> float:
    """Return e to the mean negative log-probability of the tokens."""
    return math.exp(-sum(logprobs) / len(logprobs))


def _logprobs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first."""
    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    logprobs: Any = (chosen - mx.logsumexp(logits, axis=-1)).tolist()
    return [float(each) for each in logprobs]
