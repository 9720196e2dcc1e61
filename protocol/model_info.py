"""Facts of a loaded model, as its worker tells them in `Ready`. Fields as in `messages`."""

import msgspec

from protocol.failures import Failure


class MediaInfo(msgspec.Struct, frozen=True, array_like=True):
    """Media as a loaded model takes them: memory of its towers, and of images the tokens and pixels.

    `image_tokens` is of a square image of 1,024 pixels a side, `max_pixels` the size that larger images are reduced to;
    0 is unknown, or no limit. `reason` is why the model is served without media that it has towers for.
    """

    tower_bytes: int = 0
    image_tokens: int = 0
    max_pixels: int = 0
    reason: str = ""


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of a loaded model: length of its vectors, whether they may be cut, and names of its prompts."""

    dimensions: int
    is_matryoshka: bool = False
    prompts: tuple[str, ...] = ()


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter of a loaded model: where it is, and what it takes, or why it cannot be served.

    `base` is what its files say that it was trained on.
    """

    name: str
    path: str
    rank: int = 0
    is_dora: bool = False
    nbytes: int = 0
    digest: str = ""
    base: str = ""
    failure: Failure | None = None


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a group, by the node that it runs on; of rank 0 the host and the process are the worker's own."""

    rank: int
    node: str
    host: str = ""
    pid: int = 0
    device: str = ""
    shard_bytes: int = 0


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """A model that several processes run together: how it is divided, by what they communicate, and its ranks."""

    parallel: str
    backend: str
    ranks: tuple[RankInfo, ...]


class AudioInfo(msgspec.Struct, frozen=True, array_like=True):
    """A loaded model of audio: what it does, its voices and languages where it names some, and its samples a second.

    `formats` are those that speech can be sent in here, `missing` is why not in all. A voice that has to be described
    `needs_instructions`.
    """

    hears: bool = False
    translates: bool = False
    has_words: bool = False
    speaks: bool = False
    rate: int = 0
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    missing: str = ""
    needs_instructions: bool = False
