"""Part of a message in OpenAI's chats, in the spellings of OpenAI and other servers."""

from typing import Annotated, Any, ClassVar, Final

from msgspec import Struct

from gateway.api.common.doc_hints import TEXT, UNSERVED, case, words
from gateway.media.reference import DETAILS

TEXT_PARTS: Final = ("text", "input_text", "output_text")
MEDIA_TYPES: Final = (
    *("image_url", "input_image", "image", "video_url", "input_video", "video"),
    *("input_audio", "audio_url", "file"),
)


class MediaLink(Struct, frozen=True):
    """Where a medium is: a data URI, or a URL if the configuration allows URLs. `detail` applies to images."""

    url: str
    detail: Annotated[str, words(*DETAILS)] | None = None


# Schema of `AudioData` in a part that contains audio. Parts of other types may have an empty object there.
AUDIO_DATA: Final = {"type": "object", "properties": {"data": TEXT}, "required": ["data"]}


class AudioData(Struct, frozen=True):
    """Audio in base64. The audio format is detected from the bytes."""

    data: str
    format: str = ""


class FileData(Struct, frozen=True):
    """A PDF, as base64 or as a data URI. Its name is shown to the model."""

    file_data: str | None = None
    filename: str | None = None
    file_id: Annotated[Any, UNSERVED] = None


# Schema of `FileData` in a part that contains a file. Parts of other types may have an empty object there.
_FILE_DATA: Final = {"type": "object", "properties": {"file_data": TEXT}, "required": ["file_data"]}


def _media_case(*types: str, **fields: Any) -> dict[str, Any]:
    return case(tuple(fields), type={"enum": list(types)}, **fields)


_LINKED: Final = {"anyOf": [TEXT, {"type": "object", "properties": {"url": TEXT}, "required": ["url"]}]}


class MessagePart(Struct, frozen=True):
    """One part of a message's content, with OpenAI's fields and those of other servers for media."""

    hint: ClassVar = {
        "anyOf": [
            case(("text",), type={"enum": list(TEXT_PARTS)}, text={"type": "string"}),
            case(("refusal",), type={"const": "refusal"}, refusal={"type": "string"}),
            _media_case("image_url", "input_image", image_url=_LINKED),
            _media_case("image", image=_LINKED),
            _media_case("video_url", video_url=_LINKED),
            _media_case("video", "input_video", video=_LINKED),
            _media_case("audio_url", audio_url=_LINKED),
            _media_case("input_audio", input_audio=AUDIO_DATA),
            _media_case("file", file=_FILE_DATA),
        ]
    }

    type: Annotated[str, words(*TEXT_PARTS, "refusal", *MEDIA_TYPES)]
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaLink | None = None
    image: str | MediaLink | None = None
    detail: Annotated[str, words(*DETAILS)] | None = None
    video_url: str | MediaLink | None = None
    video: str | MediaLink | None = None
    audio_url: str | MediaLink | None = None
    input_audio: AudioData | None = None
    file: FileData | None = None
