"""Audio jobs: a job is one request to transcribe or to speak, from intake to its end."""

from collections.abc import Generator
from dataclasses import dataclass

from protocol.from_worker import Usage
from worker.jobs.queued import QueuedJob


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Part of an answer, with the fields of a `Delta`. After a piece with `ends_turn`, another request may have its
    turn.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    data: bytes = b""
    ends_turn: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class AudioJob(QueuedJob):
    """Transcription or speech request. `work` computes the next piece on demand.

    `heard_s` is the length of a transcribed clip, 0 for speech.
    """

    work: Generator[AudioPiece]
    input_tokens: int
    heard_s: float = 0.0
    # Bytes of samples that the job holds until it ends.
    sample_bytes: int = 0
    # Number of tokens that the client has from an earlier worker; they are computed again, but not sent.
    left_out: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.input_tokens

    def usage(self, now: float) -> Usage:
        admitted = self.admitted or now
        return Usage(
            prompt=self.input_tokens,
            cached=0,
            completion=self.output_tokens,
            queue_ms=(admitted - self.arrived) * 1e3,
            decode_ms=(now - admitted) * 1e3,
            audio_tokens=self.input_tokens if self.heard_s else 0,
        )
