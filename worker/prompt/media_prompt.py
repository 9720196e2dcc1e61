"""Chat prompts with media: from messages and media to token ids, spans and positions."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import structs

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Media
from worker.engine.row import RowQuestions
from worker.errors import RequestInvalid
from worker.model.loader import LoadedModel
from worker.prompt.encode import PromptEncoder
from worker.prompt.rewrites import Content, Messages
from worker.prompt.templates import Renderer
from worker.vision.checkpoint import UnsupportedVision
from worker.vision.families import PreparedMedia, Processor, expanded, open_processor
from worker.vision.images import MediaLimits
from worker.vision.media import Grid, Span, positions

log = logging.getLogger("mlxd.worker")

KINDS: Final = ("image", "video", "audio")


@dataclass(slots=True, frozen=True)
class EncodedPrompt:
    """Encoded prompt of a row. `text` has markers in place of media, and is None for a prompt of ids.

    `deviations` names the deviations from the request.
    """

    ids: list[int]
    text: str | None = None
    spans: list[Span] = field(default_factory=list[Span])
    positions: npt.NDArray[np.int32] | None = None
    deviations: tuple[str, ...] = ()
    # Numbers of turns and of tokens that were truncated from the request's prompt.
    truncated: tuple[int, int] = (0, 0)
    # Questions behind the prompt; None for a prompt that is continued.
    questions: RowQuestions | None = None


@dataclass(slots=True, frozen=True)
class NoMedia:
    """Prompts of a model that takes no media, for a `reason` that is empty for a text model."""

    renderer: Renderer
    reason: str
    modalities: tuple[str, ...] = ()

    def encode(self, prompt: ChatPrompt, *_: object) -> EncodedPrompt:
        """Refuse the prompt's media. Raises `RequestInvalid`."""
        raise _unserved(prompt.media[0], (), self.reason)


class MediaPrompts:
    """Encoder of chat prompts with media, for one model that takes media."""

    def __init__(
        self, processor: Processor, renderer: Renderer, placeholders: Mapping[str, int], most: int, in_space: bool
    ) -> None:
        """A prompt may have `most` media. `in_space` means that the model's positions have axes of time, height and
        width."""
        self.processor = processor
        self.renderer = renderer
        self._placeholders = dict(placeholders)
        self._most = most
        self._in_space = in_space
        shown = renderer.shown
        # A model without video support can be shown a clip's frames as images.
        self.modalities = tuple(kind for kind in KINDS if kind in shown or (kind == "video" and "image" in shown))

    def encode(self, prompt: ChatPrompt, encode: Callable[[str, int], list[int]], salt: str = "") -> EncodedPrompt:
        """Encode a prompt with its media in place. `encode` gets the text and the number of tokens that media will add.

        Features are cached by content and by the `salt` of the prompt's prefixes, and shared only within a salt. Raises
        `RequestInvalid`, with the path of the part if the error is about one medium.
        """
        prompt, prepared, deviations = self._prepare(prompt, salt)
        text, order = self.renderer.place(prompt)
        placed = [prepared[index] for index in order]
        pieces = self.processor.markers.split(text)
        full = "".join(before + (placed[at].text if kind else "") for at, (before, kind) in enumerate(pieces))
        runs = [run for medium in placed for run in medium.runs]
        ids = encode(full, sum(runs) - len(runs))
        marks = [self._placeholders[medium.kind] for medium in placed for _ in medium.runs]
        try:
            begins, ids = expanded(ids, self._placeholders.values(), marks, runs)
        except ValueError as error:
            message = "the model's tokenizer does not keep each image, video and audio clip in its place"
            raise RequestInvalid(Code.TEMPLATE_ERROR, message, param="messages") from error
        places = None
        if self._in_space and placed:
            grids: list[Grid] = [grid for medium in placed for grid in medium.grids]
            places = positions(len(ids), list(zip(begins, grids, strict=True)))
        return EncodedPrompt(ids, text, _spans(placed, begins), places, deviations)

    def _prepare(self, prompt: ChatPrompt, salt: str) -> tuple[ChatPrompt, list[PreparedMedia], tuple[str, ...]]:
        """Prepare the media of a prompt; clips become images if the template does not render clips."""
        if len(prompt.media) > self._most:
            message = (
                f"The request has {len(prompt.media)} images, videos and audio clips; at most {self._most} are taken."
            )
            raise RequestInvalid(Code.TOO_MANY_MEDIA, message, param=prompt.media[self._most].param or "messages")
        prepared: list[PreparedMedia] = []
        became: list[list[PreparedMedia]] = []
        deviations: list[str] = []
        for media in (_salted(media, salt) for media in prompt.media):
            if media.kind not in self.modalities:
                raise _unserved(media, self.modalities)
            if media.kind in self.renderer.shown:
                became.append([self.processor.read(media)])
            else:
                became.append(self.processor.read_frames(media))
                deviations.append(f"video-as-{len(became[-1])}-images")
            prepared += became[-1]
        starts = np.cumsum([0, *map(len, became)]).tolist()

        def shown(content: Content) -> Content:
            if not isinstance(content, list):
                return content
            return [new for part in content for new in ([part] if part["type"] == "text" else parts(part["media"]))]

        def parts(index: int) -> list[dict[str, Any]]:
            return [
                {"type": medium.kind, "media": starts[index] + offset} for offset, medium in enumerate(became[index])
            ]

        messages: Messages = [{**message, "content": shown(message.get("content"))} for message in prompt.messages]
        return structs.replace(prompt, messages=messages), prepared, tuple(deviations)


def open_media(
    loaded: LoadedModel,
    encoder: PromptEncoder,
    limits: MediaLimits,
    memory_bytes: int,
    family: str = "",
    tool_family: str = "",
) -> MediaPrompts | NoMedia:
    """Open the encoder of a model's prompts with media. The families are those of `families_of`."""
    if loaded.vision is None:
        return NoMedia(Renderer(loaded.tokenizer, None, family, tool_family), loaded.no_vision)
    needs = loaded.vision.needs
    try:
        if max(needs.placeholders.values()) >= loaded.vocab_size:
            raise UnsupportedVision("its placeholders are beyond its vocabulary")
        processor = open_processor(
            loaded.path,
            loaded.vision.config,
            lambda text: encoder.encode(text, add_special_tokens=True),
            needs.placeholders,
            limits,
            memory_bytes,
        )
        renderer = Renderer(loaded.tokenizer, processor.markers, family, tool_family)
        media = MediaPrompts(processor, renderer, needs.placeholders, limits.count, needs.mrope is not None)
        if not media.modalities:
            raise UnsupportedVision("its chat template has no place for images")
    except UnsupportedVision as reason:
        log.warning("the model is served without media: %s", reason)
        return NoMedia(Renderer(loaded.tokenizer, None, family, tool_family), str(reason))
    return media


def _unserved(media: Media, modalities: Sequence[str], reason: str = "") -> RequestInvalid:
    """Build the refusal of a type of medium that the model does not take."""
    taken = f"it takes {', '.join(modalities)} and text" if modalities else reason or "it takes text alone"
    message = f"This model takes no {media.kind}: {taken}."
    return RequestInvalid(Code.UNSUPPORTED_MODALITY, message, param=media.param or "messages")


def _salted(media: Media, salt: str) -> Media:
    """Return a medium with a digest specific to the salt, so that cache timing reveals nothing about other salts."""
    if not salt:
        return media
    key = blake2b(salt.encode(), digest_size=32).digest()
    return structs.replace(media, digest=blake2b(media.digest, digest_size=32, key=key).digest())


def _spans(placed: Sequence[PreparedMedia], begins: Sequence[int]) -> list[Span]:
    """Return one span for each run of placeholders that belong to a separately encoded medium."""
    spans: list[Span] = []
    run = 0
    for prepared in placed:
        parts = iter(prepared.media)
        medium, first = next(parts), 0
        for length in prepared.runs:
            at, end = begins[run], begins[run] + length + prepared.closing
            run += 1
            while at < end:
                if first == medium.tokens:
                    medium, first = next(parts), 0
                taken = min(end - at, medium.tokens - first)
                spans.append(Span(at, at + taken, medium, first))
                at, first = at + taken, first + taken
    return spans
