"""Command `python -m worker.tools.verify`: checks that a request's output does not depend on how it is run.

It runs the same requests alone, then batched, chunked, from caches, preempted, resumed and with drafts, and compares
every token. Before that it compares the perplexity of a paragraph with that of mlx-lm alone, and measures the time to
the first token. It prints a `protocol.verify_output.VerifyCheck` per line. Exit statuses: 0 all equal · 1 a difference,
a wrong number, or a check that proved nothing · otherwise a worker's.

Models that generate no text have checks of their own. An audio model must give the same answer to the same clip or text
again. The result of an embedding or scoring model must not depend on the other inputs of its pass.
"""

import argparse
import os
import sys
from collections.abc import Generator, Sequence
from typing import Final

import msgspec
import numpy as np

from protocol.checkpoint import AUDIO, EMBED, TEXT
from protocol.failures import ExitStatus, Failure
from protocol.spec import WorkerSpec, read_spec
from protocol.to_worker import EmbedPrompt, Generate, Sampling, ScorePrompt, SpeechPrompt, TranscribePrompt
from protocol.verify_output import Difference, VerifyCheck
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_model import load_audio_model
from worker.audio.sound_writer import SoundWriter
from worker.embedding.intake_and_loop import Preparer
from worker.embedding.load_model import EmbeddingModel, kind_of_spec, load_embedding_model
from worker.errors import LoadFailed, PartnerLost, RequestInvalid
from worker.group.coordinator import open_group
from worker.model import memory
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import LONGEST_WORDS, Verifier, first_difference, reference_of

EXIT_DIFFERENT: Final = 1
_SAMPLE_RATE: Final = 16_000
# Length of the clip for audio models, which is longer than one window of any family.
_CLIP_S: Final = 35.0
_SPOKEN_TEXT: Final = "One, two."
# Lengths of the inputs for embedding and scoring models, in words: equal, nearly equal, and very different.
_WORDS: Final = (8, 8, 8, 9, 40, 44, 150, 3)
# Maximum difference of results in float32, because kernels round differently by the shape of a pass.
_FLOAT32_TOLERANCE: Final = 1e-5
# Maximum difference of results in 16 bits or with quantized weights.
_LOW_PRECISION_TOLERANCE: Final = 0.02


def _checks(spec: WorkerSpec, tokens: int, words: int) -> Generator[VerifyCheck]:
    """Run the checks for the model's kind. Raises `LoadFailed`, `RequestInvalid`, and `PartnerLost`."""
    kind = kind_of_spec(spec)
    if kind == AUDIO:
        yield from audio_checks(spec)
        return
    if kind != TEXT:
        yield from reader_checks(load_embedding_model(spec, kind, lambda _stage, _done, _total: None))
        return
    reference = reference_of(spec) if spec.group is None else None
    lead, division = open_group(spec, _lost) if spec.group is not None else (None, None)
    loaded = load_checked(spec, lambda _stage, _done, _total: None, division, lead)
    grant = memory.MemoryGrant(spec, loaded.weights_bytes)
    grant.enforce(grant.limits())
    yield from Verifier(loaded, spec, tokens, words, lead, reference).checks()
    if lead is not None:
        lead.leave()


def _lost(failure: Failure, status: int) -> None:
    """End the process; its main thread may otherwise wait for another rank forever."""
    print(failure.message, file=sys.stderr, flush=True)
    os._exit(status)


def audio_checks(spec: WorkerSpec) -> Generator[VerifyCheck]:
    """Load a model, and run one request before and after another. Raises `LoadFailed` and `RequestInvalid`."""
    model = load_audio_model(spec, lambda _stage, _done, _total: None)
    prompt = TranscribePrompt(_tone()) if model.transcriber is not None else SpeechPrompt(_SPOKEN_TEXT, format="pcm")
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
    at = np.arange(int(_CLIP_S * _SAMPLE_RATE)) / _SAMPLE_RATE
    samples = 0.3 * np.sin(2 * np.pi * 440 * at) * np.sin(2 * np.pi * 0.3 * at)
    writer = SoundWriter("wav", _SAMPLE_RATE, 1.0)
    return writer.add(samples.astype(np.float32)) + writer.end()


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


def main(argv: Sequence[str] | None = None) -> int:
    """Verify one model; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="worker.tools.verify", description="Compare what a model says however it is run."
    )
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each request")
    parser.add_argument("--words", type=int, default=LONGEST_WORDS, help="of the longest prompt")
    options = parser.parse_args(argv)
    try:
        spec = read_spec(options.spec)
    except msgspec.DecodeError as error:
        print(f"bad --spec: {error}", file=sys.stderr)
        return ExitStatus.BAD_CONFIG
    try:
        status = 0
        for check in _checks(spec, options.tokens, options.words):
            print(msgspec.json.encode(check).decode(), flush=True)
            if not check.is_good:
                status = EXIT_DIFFERENT
    except LoadFailed as error:
        print(error.failure.message, file=sys.stderr)
        return error.exit_status
    except PartnerLost as error:
        print(error.failure.message, file=sys.stderr)
        return ExitStatus.PARTNER_LOST
    except RequestInvalid as error:
        print(f"the model cannot take the requests of this test: {error.failure.message}", file=sys.stderr)
        return ExitStatus.MODEL_UNUSABLE
    return status


if __name__ == "__main__":
    sys.exit(main())
