"""Facts of a loaded model, which its worker reports in `Ready`. Fields follow the rules of `to_worker`."""

import msgspec

from protocol.failures import Failure


class MediaInfo(msgspec.Struct, frozen=True, array_like=True):
    """Media of a loaded model: memory of its media towers, and the tokens and pixels of images.

    `image_tokens` is the number of tokens of an image of 1,024 × 1,024 pixels; 0 means unknown. Larger images are
    reduced to `max_pixels`; 0 means that another limit applies. If the model is served without media, `reason` explains
    why.
    """

    tower_bytes: int = 0
    image_tokens: int = 0
    max_pixels: int = 0
    reason: str = ""


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of a loaded model: the length of its vectors, whether the vectors may be truncated, and the names of
    its prompts."""

    dimensions: int
    is_matryoshka: bool = False
    prompts: tuple[str, ...] = ()


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """Adapter of a loaded model: its folder, and either its size or the reason why it cannot be served.

    `base` is the model on which the adapter was trained, according to the adapter's files.
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
    """Rank of a group and its node. `host`, `pid` and `device` are not set for rank 0, which is the worker's own
    process."""

    rank: int
    node: str
    host: str = ""
    pid: int = 0
    device: str = ""
    shard_bytes: int = 0


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """Group of processes that run one model: how it is divided, the communication backend, and its ranks."""

    parallel: str
    backend: str
    ranks: tuple[RankInfo, ...]


class AudioInfo(msgspec.Struct, frozen=True, array_like=True):
    """Audio model: its tasks, its sample rate, and its voices and languages if the model lists them.

    `formats` are the available formats of speech, and `missing` explains why others are not available.
    `needs_instructions` is set if a request must describe the voice.
    """

    transcribes: bool = False
    translates: bool = False
    has_words: bool = False
    speaks: bool = False
    rate: int = 0
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    missing: str = ""
    needs_instructions: bool = False
