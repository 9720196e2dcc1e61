"""Check of an embedding or scoring model: the result of an input does not depend on the other inputs of its pass."""

from collections.abc import Generator
from typing import Final

import numpy as np

from protocol.kinds import EMBED
from protocol.prompts import EmbedPrompt, ScorePrompt
from protocol.to_worker import Generate, Sampling
from protocol.verify import Difference, VerifyCheck
from worker.embedding.load_model import EmbeddingModel
from worker.embedding.prepare import Preparer

# Lengths of the inputs in words: equal, nearly equal, and very different.
_WORDS: Final = (8, 8, 8, 9, 40, 44, 150, 3)
# Maximum difference of results in float32, because kernels round differently by the shape of a pass.
_FLOAT32_TOLERANCE: Final = 1e-5
# Maximum difference of results in 16 bits or with quantized weights.
_LOW_PRECISION_TOLERANCE: Final = 0.02


def reader_checks(reader: EmbeddingModel) -> Generator[VerifyCheck]:
    """Compare the result of each input alone with its result in a pass of all inputs, and in two smaller passes: one of
    the three inputs of equal length, one of the others. Raises `RequestInvalid`.
    """
    texts = tuple(" ".join(f"word{at * 7 % 100}" for at in range(words)) for words in _WORDS)
    prompt = EmbedPrompt(texts, truncate=-1) if reader.kind == EMBED else ScorePrompt(("word7",), texts, truncate=-1)
    items = Preparer(reader).job(Generate(1, prompt, Sampling()), 0.0).items
    alone = np.concatenate([reader.compute([item]) for item in items])
    ways = {"together": [range(len(items))], "equal lengths": [range(3), range(3, len(items))]}
    for name, groups in ways.items():
        rows = np.concatenate([reader.compute([items[at] for at in group]) for group in groups])
        # NaN counts as an infinite difference.
        apart = np.nan_to_num(np.abs(rows - alone).max(axis=1), nan=np.inf)
        most = _FLOAT32_TOLERANCE if reader.is_float32 else _LOW_PRECISION_TOLERANCE
        yield VerifyCheck(
            name,
            requests=len(items),
            tokens=sum(len(item.ids) for item in items),
            differences=tuple(Difference(at, 0) for at, each in enumerate(apart) if each > most),
            drift=float(apart.max()),
        )
