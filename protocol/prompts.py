"""Prompts of `Generate` and `Tokenize`. Fields follow the rules of `to_worker`."""

from typing import Any

import msgspec


class Media(msgspec.Struct, frozen=True, array_like=True):
    """Image, video or audio clip of a prompt, as the client's bytes: neither resized nor re-encoded.

    `kind` is `image`, `video` or `audio`; `digest` is the BLAKE2b-256 of `data`, computed by the gateway. `options` are
    the request's `min_pixels`, `max_pixels`, `fps` and `num_frames`. If `frames` is n, `data` is a list of n JPEG
    files, each after its length in 4 bytes, big-endian. `param` is the part's path, for error messages.
    """

    kind: str
    digest: bytes
    data: bytes
    options: dict[str, int | float] = {}
    param: str = ""


class ChatPrompt(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Messages for the chat template, already in the form that templates expect (`role`, `content`, …).

    `content` is text, or, in a message with media, a list of `{"type": "text", "text": …}` and `{"type": "image" |
    "video" | "audio", "media": i}` in the client's order, where `i` is an index of `media`. With `must_call`, only tool
    calls may follow the reasoning; if `callable_tools` is not empty, only these tools may be called. `strict_tools`
    names tools whose arguments must always fit their schema, even if no call is required.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    template_kwargs: dict[str, Any] = {}
    # Whether the model continues the last assistant message instead of opening a new one.
    continue_final: bool = False
    # Whether the model reasons; None means the template's default.
    thinking: bool | None = None
    # Reasoning effort: `low`, `medium` or `high`; empty if unknown.
    effort: str = ""
    must_call: bool = False
    callable_tools: tuple[str, ...] = ()
    # Whether the answer ends after its first tool call.
    one_call: bool = False
    strict_tools: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()


class Infill(msgspec.Struct, frozen=True, array_like=True):
    """Fill-in-the-middle input: the text after the gap, the beginning of the gap's text, and files as (name, text)."""

    suffix: str = ""
    middle: str = ""
    files: tuple[tuple[str, str], ...] = ()


class TextPrompt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Plain text, encoded with the tokenizer's defaults.

    A BOS is added if the tokenizer does so and `adds_special` is true. With `infill`, the text is the one before a gap,
    which the model fills by means of its fill-in-the-middle tokens.
    """

    text: str
    infill: Infill | None = None
    adds_special: bool = True


class TokensPrompt(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Token ids, which the worker checks against the vocabulary."""

    ids: tuple[int, ...]


class EmbedPrompt(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Texts, or token ids, each of which gets an embedding.

    `prompt_name` is one of the model's prompts, written before each text. With `is_query` or `is_document` and no name,
    the model's prompt for queries or documents is used, if the model has one. `dimensions` 0 means all. `truncate` is
    the number of tokens to which a longer input is cut; with 0, an input beyond the model's limit is refused, with -1
    it is cut to that limit.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    prompt_name: str = ""
    is_query: bool = False
    is_document: bool = False
    dimensions: int = 0
    truncate: int = 0


class ScorePrompt(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Pairs of a query and a document, to score how well the document answers the query.

    There is one query for all documents, or one for each document. `truncate` is as in `EmbedPrompt`, for a whole pair;
    `truncate_document` is for the document alone, with 0 for no limit. Both cut off documents only. `instruction` is
    for models that take one. `params` are the client's names of queries and documents, for error messages.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    instruction: str = ""
    truncate: int = 0
    truncate_document: int = 0
    params: tuple[str, str] = ("query", "documents")


class TranscribePrompt(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Clip to transcribe, or with `is_translated` to translate to English.

    `data` is the client's file. `language` is an ISO 639-1 code, empty for detection; `text` is the preceding text, or
    words that may occur. `has_words` requests the times of words. A clip of more than `most_s` seconds is refused.
    """

    data: bytes
    language: str = ""
    text: str = ""
    is_translated: bool = False
    has_words: bool = False
    most_s: float = 0.0


class SpeechPrompt(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Text to speak, in one of the file formats of `AudioInfo`.

    `voice` is one of the model's voices, empty for the default voice; `instructions` are for models that take
    instructions. Speech of more than `most_s` seconds fails.
    """

    text: str
    voice: str = ""
    speed: float = 1.0
    format: str = "wav"
    instructions: str = ""
    most_s: float = 0.0


class NextTurnPrompt(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Conversation of the sequence `rid`, which has ended, with its answer, as the next turn's prompt will begin.

    It is only for a sequence that fills the prefix cache. The worker refuses it if it does not remember the sequence.
    `seed` is that sequence's.
    """

    rid: int
    seed: int = 0


Prompt = (
    ChatPrompt
    | TextPrompt
    | TokensPrompt
    | EmbedPrompt
    | ScorePrompt
    | TranscribePrompt
    | SpeechPrompt
    | NextTurnPrompt
)
