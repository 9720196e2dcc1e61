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
from protocol.messages import ChatPrompt, Media
from worker.errors import RequestInvalid
from worker.model.loader import LoadedModel
from worker.prompt.contents import Content
from worker.prompt.encode import PromptEncoder
from worker.prompt.rewrites import Messages
from worker.prompt.templates import Renderer
from worker.vision.families import PreparedMedia, Processor, expanded, open_processor
from worker.vision.images import MediaLimits
from worker.vision.media import Span
from worker.vision.positions import Grid, positions
from worker.vision.unserved import UnsupportedVision

log = logging.getLogger("mlxd.worker")

KINDS: Final = ("image", "video", "audio")


@dataclass(slots=True, frozen=True)
class EncodedPrompt:
    """A prompt as a row runs it. `text` is None of a prompt that came as ids; media stand in it as their markers.

    `relaxed` names what is done in another way than the request says.
    """

    ids: list[int]
    text: str | None = None
    spans: list[Span] = field(default_factory=list[Span])
    positions: npt.NDArray[np.int32] | None = None
    relaxed: tuple[str, ...] = ()
    # Turns and tokens of the request's prompt that are not in it.
    left_out: tuple[int, int] = (0, 0)


class MediaPrompts:
    """Encodes chat prompts that hold media, for one model that takes some."""

    def __init__(
        self, processor: Processor, renderer: Renderer, placeholders: Mapping[str, int], in_space: bool
    ) -> None:
        """`in_space`: the model has positions in time, height and width."""
        self.processor = processor
        self.renderer = renderer
        self._placeholders = dict(placeholders)
        self._in_space = in_space
        shown = renderer.shown
        # Frames of a clip can be shown as images.
        self.modalities = tuple(kind for kind in KINDS if kind in shown or (kind == "video" and "image" in shown))

    def encode(self, prompt: ChatPrompt, encode: Callable[[str, int], list[int]], salt: str = "") -> EncodedPrompt:
        """Ids of a prompt with its media in place; `encode` is given text and the tokens to come beside its own.

        Media are known by their content and the `salt` of the prompt's prefixes: features are shared within it. Raises
        `RequestInvalid`, with the path of the part for what concerns one medium.
        """
        prompt, prepared, relaxed = self._prepare(prompt, salt)
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
        places = self._positions(len(ids), placed, begins) if self._in_space and placed else None
        return EncodedPrompt(ids, text, _spans(placed, begins), places, relaxed)

    def _prepare(self, prompt: ChatPrompt, salt: str) -> tuple[ChatPrompt, list[PreparedMedia], tuple[str, ...]]:
        """The prompt with its media read, and clips as images for a template that shows none."""
        prepared: list[PreparedMedia] = []
        became: list[list[PreparedMedia]] = []
        relaxed: list[str] = []
        for media in (_salted(media, salt) for media in prompt.media):
            if media.kind not in self.modalities:
                raise unserved(media, self.modalities)
            if media.kind in self.renderer.shown:
                became.append([self.processor.read(media)])
            else:
                became.append(self.processor.read_frames(media))
                relaxed.append(f"video-as-{len(became[-1])}-images")
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
        return structs.replace(prompt, messages=messages), prepared, tuple(relaxed)

    @staticmethod
    def _positions(length: int, placed: Sequence[PreparedMedia], begins: Sequence[int]) -> npt.NDArray[np.int32]:
        grids: list[Grid] = [grid for medium in placed for grid in medium.grids]
        return positions(length, list(zip(begins, grids, strict=True)))


def open_media(
    loaded: LoadedModel, encoder: PromptEncoder, limits: MediaLimits, memory_bytes: int
) -> tuple[MediaPrompts | None, str]:
    """Encoder of a model's prompts with media; None, with the reason, of one that takes none."""
    if loaded.vision is None:
        return None, loaded.no_vision
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
        renderer = Renderer(loaded.tokenizer, processor.markers)
        media = MediaPrompts(processor, renderer, needs.placeholders, needs.mrope is not None)
        if not media.modalities:
            raise UnsupportedVision("its chat template has no place for images")
    except UnsupportedVision as reason:
        log.warning("the model is served without media: %s", reason)
        return None, str(reason)
    return media, ""


def unserved(media: Media, modalities: Sequence[str], reason: str = "") -> RequestInvalid:
    """A refusal of a kind of medium that the model does not take."""
    taken = f"it takes {', '.join(modalities)} and text" if modalities else reason or "it takes text alone"
    message = f"This model takes no {media.kind}: {taken}."
    return RequestInvalid(Code.UNSUPPORTED_MODALITY, message, param=media.param or "messages")


def _salted(media: Media, salt: str) -> Media:
    """A medium under a digest that no other salt has: how long its features take tells nothing of others."""
    if not salt:
        return media
    key = blake2b(salt.encode(), digest_size=32).digest()
    return structs.replace(media, digest=blake2b(media.digest, digest_size=32, key=key).digest())


def _spans(placed: Sequence[PreparedMedia], begins: Sequence[int]) -> list[Span]:
    """One span for each stretch of placeholders of one medium that is encoded alone."""
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
