"""Facts of a loaded model, which its worker reports in `Ready`. Fields follow the rules of `to_worker`."""

import msgspec

from protocol.failures import Failure


class MediaInfo(msgspec.Struct, frozen=True, array_like=True):
    """Media limits of a loaded model: memory of its towers, and tokens and pixels of images.

    `image_tokens` is for an image of 1,024 × 1,024 pixels, `max_pixels` the size to which larger images are reduced; 0
    means unknown, or no limit. `reason` explains why the model is served without the media of its towers.
    """

    tower_bytes: int = 0
    image_tokens: int = 0
    max_pixels: int = 0
    reason: str = ""


class EmbeddingInfo(msgspec.Struct, frozen=True, array_like=True):
    """Embeddings of a loaded model: length of its vectors, whether they may be truncated, and names of its prompts."""

    dimensions: int
    is_matryoshka: bool = False
    prompts: tuple[str, ...] = ()


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """Adapter of a loaded model: its folder, and its size, or why it cannot be served.

    `base` is the model on which it was trained, according to its files.
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
    """Rank of a group and its node; rank 0's host and process are the worker's own."""

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
    """Audio model: its tasks, its voices and languages if it has a list of them, and its sample rate.

    `formats` are the available formats of speech, `missing` explains why some are not available. `needs_instructions`
    is set if the voice must be described.
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
