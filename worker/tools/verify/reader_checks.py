"""Check of a model of embeddings or scores: the numbers of an input alone are those beside others."""

from collections.abc import Generator
from typing import Final

import numpy as np

from protocol.kinds import EMBED
from protocol.messages import EmbedPrompt, Generate, Sampling, ScorePrompt
from protocol.verify import Difference, VerifyCheck
from worker.embedding.load_model import EmbeddingModel
from worker.embedding.prepare import Preparer

# Words of the inputs: of one length, of nearly one, and far apart.
_WORDS: Final = (8, 8, 8, 9, 40, 44, 150, 3)
# Kernels round by the shape of a pass: what float32 loses, and what 16 bits or quantized weights may.
_FLOAT32: Final = 1e-5
_ROUNDED: Final = 0.02


def reader_checks(reader: EmbeddingModel) -> Generator[VerifyCheck]:
    """All in one padded pass, and each length apart. Raises `RequestInvalid`."""
    texts = tuple(" ".join(f"word{at * 7 % 100}" for at in range(words)) for words in _WORDS)
    prompt = EmbedPrompt(texts, truncate=-1) if reader.kind == EMBED else ScorePrompt(("word7",), texts, truncate=-1)
    items = Preparer(reader).job(Generate(1, prompt, Sampling()), 0.0).items
    alone = np.concatenate([reader.compute([item]) for item in items])
    ways = {"together": [range(len(items))], "equal lengths": [range(3), range(3, len(items))]}
    for name, groups in ways.items():
        rows = np.concatenate([reader.compute([items[at] for at in group]) for group in groups])
        # What is not a number differs from everything.
        apart = np.nan_to_num(np.abs(rows - alone).max(axis=1), nan=np.inf)
        most = _FLOAT32 if reader.is_float32 else _ROUNDED
        yield VerifyCheck(
            name,
            requests=len(items),
            tokens=sum(len(item.ids) for item in items),
            differences=tuple(Difference(at, 0) for at, each in enumerate(apart) if each > most),
            drift=float(apart.max()),
        )
