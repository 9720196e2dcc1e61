"""Checks of models that generate no text: audio models, and models of embeddings and scores.

Check of an audio model: the same clip or text gives the same answer again, and all its numbers are finite.

Check of an embedding or scoring model: the result of an input does not depend on the other inputs of its pass.
"""

from collections.abc import Generator
from typing import Final

import numpy as np

from protocol.checkpoint import EMBED
from protocol.spec import WorkerSpec
from protocol.to_worker import EmbedPrompt, Generate, Sampling, ScorePrompt, SpeechPrompt, TranscribePrompt
from protocol.verify_output import Difference, VerifyCheck
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_model import load_audio_model
from worker.audio.sound_writer import SoundWriter
from worker.embedding.intake_and_loop import Preparer
from worker.embedding.load_model import EmbeddingModel
from worker.tools.verify.verifier import first_difference

_RATE: Final = 16_000
# Length of the test clip, which is longer than one window of any family.
_CLIP_S: Final = 35.0
_TEXT: Final = "One, two."


def audio_checks(spec: WorkerSpec) -> Generator[VerifyCheck]:
    """Load a model, and run one request before and after another. Raises `LoadFailed` and `RequestInvalid`."""
    model = load_audio_model(spec, lambda _stage, _done, _total: None)
    prompt = TranscribePrompt(_tone()) if model.transcriber is not None else SpeechPrompt(_TEXT, format="pcm")
    # Results at this temperature differ if draws depend on more than the seed.
    requests = [Generate(1, prompt, Sampling(temperature=0.2, seed=seed)) for seed in (1, 2, 1)]
    intake = AudioIntake(model, lambda: None)
    answers = [list(intake.job_now(request).work) for request in requests]
    first, last = answers[0], answers[2]
    is_equal = first == last
    yield VerifyCheck(
        "again",
        requests=len(requests),
        tokens=sum(len(piece.token_ids) for answer in answers for piece in answer),
        differences=() if is_equal else (Difference(2, first_difference(first, last)),),
        note="" if any(piece.text or piece.data for piece in first) else "the model gave nothing",
    )


def _tone() -> bytes:
    """Return a file with a tone of varying volume."""
    at = np.arange(int(_CLIP_S * _RATE)) / _RATE
    samples = 0.3 * np.sin(2 * np.pi * 440 * at) * np.sin(2 * np.pi * 0.3 * at)
    writer = SoundWriter("wav", _RATE, 1.0)
    return writer.add(samples.astype(np.float32)) + writer.end()


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
