"""Check of an audio model: the same clip or text gives the same answer again, and all its numbers are finite."""

from collections.abc import Generator
from typing import Final

import numpy as np

from protocol.prompts import SpeechPrompt, TranscribePrompt
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling
from protocol.verify import Difference, VerifyCheck
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_model import load_audio_model
from worker.audio.sound_writer import SoundWriter
from worker.tools.verify.comparison import first_difference

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
