"""Engine with rows whose media are made by hand: requests of tokens, with spans of placeholders in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.vision_models import MediaPrompt
from worker.engine.row import Row
from worker.model.loader import LoadedModel
from worker.prompt.intake import Intake
from worker.speculation.drafter import Drafter
from worker.tools.verify.verifier import EngineSession, VerifiedOutput
from worker.vision.encoder import FeatureCache


@dataclass(slots=True)
class MediaRequest:
    """A request with what the intake would find in it."""

    request: Generate
    prompt: MediaPrompt


def media_request(rid: int, prompt: MediaPrompt, *, tokens: int = 12, is_sampled: bool = False) -> MediaRequest:
    sampling = Sampling(
        temperature=0.8 if is_sampled else 0.0, seed=rid, top_p=0.95 if is_sampled else 1.0, ignore_eos=True
    )
    request = Generate(rid, TokensPrompt(tuple(prompt.ids)), sampling, max_tokens=tokens, top_logprobs=2)
    return MediaRequest(request, prompt)


class _MediaIntake:
    """The intake, with the media of its requests put into their rows."""

    def __init__(self, intake: Intake, prompts: dict[int, MediaPrompt]) -> None:
        self._intake = intake
        self._prompts = prompts

    @property
    def writer(self) -> Any:
        return self._intake.writer

    def row(self, request: Generate, arrived: float) -> Row:
        row = self._intake.row(request, arrived)
        prompt = self._prompts[request.rid]
        row.media, row.positions = prompt.media, prompt.positions
        return row


class MediaSession(EngineSession):
    @property
    def features(self) -> FeatureCache:
        features = self._engine.features
        assert features is not None
        return features


def run(
    loaded: LoadedModel,
    spec: WorkerSpec,
    waves: Sequence[Sequence[MediaRequest]],
    *,
    resumes: dict[int, Any] | None = None,
    drafter: Drafter | None = None,
) -> tuple[list[VerifiedOutput], "MediaSession"]:
    """The newest output of each request, and the session that has made them."""
    prompts = {each.request.rid: each.prompt for wave in waves for each in wave}
    intake: Any = _MediaIntake(Intake(loaded), prompts)
    session = MediaSession(loaded, intake, spec, drafter)
    outputs = session.run(
        [[replace(each.request, resume=(resumes or {}).get(each.request.rid, ())) for each in wave] for wave in waves]
    )
    return outputs, session
