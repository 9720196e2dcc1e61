"""Message parts with an image, video, audio or file, in the spellings of OpenAI and other servers."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.openai.message_part import AudioData, MediaLink, MessagePart
from gateway.api.openai.request import ChatCompletionRequest
from gateway.errors import BadRequest, Unsupported, missing_parameter
from gateway.media.reference import AUDIO, IMAGE, VIDEO, by_base64, by_url, detail_options, document, merged

# Maps each type of part to its kind of medium, and to the fields that may have its URL, the usual field first.
MEDIA_PARTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "image_url": (IMAGE, ("image_url",)),
    "input_image": (IMAGE, ("image_url", "image")),
    "image": (IMAGE, ("image", "image_url")),
    "video_url": (VIDEO, ("video_url",)),
    "input_video": (VIDEO, ("video", "video_url")),
    "video": (VIDEO, ("video", "video_url")),
    "audio_url": (AUDIO, ("audio_url",)),
    "input_audio": (AUDIO, ("input_audio", "audio_url")),
}

Options = dict[str, int | float]
# Options that apply to all media of a request, by kind of medium.
MediaOptions = Mapping[str, Options]
NO_OPTIONS: Final[MediaOptions] = {IMAGE: {}, VIDEO: {}, AUDIO: {}}


def media_options(request: ChatCompletionRequest) -> MediaOptions:
    """Merge the request's `mm_processor_kwargs` and `media_io_kwargs`; the latter win. Raises `BadRequest`."""
    processing, reading = request.mm_processor_kwargs, request.media_io_kwargs
    pixels = {} if processing is None else _set(min_pixels=processing.min_pixels, max_pixels=processing.max_pixels)
    if pixels.get("min_pixels", 0) > pixels.get("max_pixels", 1 << 30):
        param = "mm_processor_kwargs.min_pixels"
        raise BadRequest(f"'{param}' is more than 'max_pixels'.", param, "invalid_value")
    frames = {} if processing is None else _set(fps=processing.fps)
    if reading is not None and reading.video is not None:
        frames |= _set(num_frames=reading.video.num_frames, fps=reading.video.fps)
    return {IMAGE: pixels, VIDEO: pixels | frames, AUDIO: {}}


def media_part(part: MessagePart, where: str, options: MediaOptions) -> dict[str, Any]:
    """Lower a part whose type is one of `MEDIA_PARTS`. Raises `BadRequest`."""
    kind, fields = MEDIA_PARTS[part.type]
    given = next((value for name in fields if (value := getattr(part, name)) is not None), None)
    if isinstance(given, AudioData):
        return by_base64(kind, given.data, where)
    if given is None:
        raise missing_parameter(f"{where}.{fields[0]}")
    url, detail = (given.url, given.detail) if isinstance(given, MediaLink) else (given, None)
    if kind == IMAGE:
        own = detail_options(detail or part.detail, f"{where}.detail")
        return by_url(kind, url, where, merged(own, options[kind]))
    return by_url(kind, url, where, options[kind])


def file_part(part: MessagePart, where: str, options: MediaOptions) -> dict[str, Any]:
    """Lower a part with a PDF. Raises `BadRequest`."""
    if part.file is None:
        raise missing_parameter(f"{where}.file")
    if part.file.file_id is not None:
        raise Unsupported("There are no uploaded files here: send the file as base64.", f"{where}.file.file_id")
    if part.file.file_data is None:
        raise missing_parameter(f"{where}.file.file_data")
    return document(part.file.file_data, part.file.filename or "", where, options[IMAGE])


def _set(**options: float | None) -> Options:
    return {name: value for name, value in options.items() if value is not None}
