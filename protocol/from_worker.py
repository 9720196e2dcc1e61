"""Messages from a worker to its gateway. Fields and tags follow the rules of `to_worker`.

Facts of a loaded model, which its worker reports in `Ready`. Fields follow the rules of `to_worker`.

Parts of a transcript, which a worker sends in the `data` of a `Delta`, and how audio is counted in tokens.
"""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from protocol.failures import Failure
from protocol.stats import Stats


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


# Tokens per second of transcribed audio, as OpenAI bills them.
TRANSCRIBED_TOKENS_PER_S: Final = 10
# Tokens per second of spoken audio, as OpenAI bills them.
SPOKEN_TOKENS_PER_S: Final = 20
# Upper bound of the memory for the decoded samples of all clips, which is a part of the worker's memory. One hour takes
# 230 MB.
MAX_CLIP_BYTES: Final = 512 << 20
# Lower bound of the memory for the decoded samples of all clips.
MIN_CLIP_BYTES: Final = 16 << 20


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Word and its times in seconds from the beginning of the clip."""

    word: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Section of speech with its times in seconds. Only Whisper sets the fields after `text`."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    # Start of the segment's window, in hundredths of a second.
    seek: int = 0
    words: tuple[Word, ...] = ()


class TranscriptPart(msgspec.Struct, frozen=True, array_like=True):
    """Text of one window of a clip. `seconds` is the length of the whole clip."""

    segments: tuple[Segment, ...]
    language: str = ""
    seconds: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[TranscriptPart] = msgspec.msgpack.Decoder(TranscriptPart)


def encode(part: TranscriptPart) -> bytes:
    """Encode a part to the `data` of a delta."""
    return _encoder.encode(part)


def decode(data: bytes) -> TranscriptPart:
    """Decode the part in the `data` of a delta. Raises `msgspec.DecodeError`."""
    return _decoder.decode(data)


class DeltaKind(IntEnum):
    """Kind of a `Delta`'s text."""

    TEXT = 0
    REASONING = 1
    TOOL_BEGIN = 2
    TOOL_ARGS = 3
    TOOL_END = 4


class Finish(IntEnum):
    """Finish reason of a sequence."""

    STOP = 0
    LENGTH = 1
    TOOL_CALLS = 2
    ABORT = 3
    ERROR = 4


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """First message of a worker, and its answer to a new `Welcome.boot`.

    A gateway of any protocol number reads it, so existing fields never change, and new ones are appended.
    `protocol` is `protocol.PROTOCOL`; `reserved` is 0, and keeps the fields after it in their places.
    """

    worker: str
    epoch: int
    pid: int
    protocol: int
    reserved: int
    package: str
    mlx_version: str
    state: str


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Load progress; `stage` is `import`, `weights` or `warmup`."""

    epoch: int
    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Message that the model is loaded and warm.

    `modalities` contains each of `image`, `video` and `audio` that prompts may have. `kind` is one of
    `protocol.checkpoint`; it is empty if the worker is of an older version, which only generates text.
    """

    epoch: int
    model_path: str
    max_context: int
    max_running: int
    vocab_size: int
    weights_bytes: int
    load_s: float
    model_type: str = ""
    has_chat_template: bool = True
    # Batch mode of rows: `together`, `equal` or `single`; empty from older workers. An empty `batch_mode_reason` means
    # that batching is not limited.
    batch_mode: str = ""
    batch_mode_reason: str = ""
    modalities: tuple[str, ...] = ()
    # Media limits; None for a model without towers, and from older workers.
    media: MediaInfo | None = None
    # Speculation: `auto`, or `off` and the reason; empty from older workers.
    speculation: str = ""
    kind: str = ""
    # Facts about an embedding model; None for all other models.
    embedding: EmbeddingInfo | None = None
    # All adapters in the worker's specification, including those that cannot be served.
    adapters: tuple[AdapterInfo, ...] = ()
    # Group of processes that run the model together; None for a single process.
    group: GroupInfo | None = None
    # Bits per value of the model's KV; 0 means the model's own precision.
    kv_bits: int = 0
    # Facts about an audio model; None for all other models.
    audio: AudioInfo | None = None
    # Attention implementation: `kernel`, or `mlx` with the reason; empty from older workers.
    attention: str = ""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Message that the prompt was tokenized and queued.

    `deviations` names the parts of a schema that the grammar does not enforce, other deviations from the request, and
    inexact computation, such as `kv-bits-8`.
    """

    rid: int
    prompt_tokens: int
    deviations: tuple[str, ...] = ()
    # Numbers of turns and tokens of the prompt that `truncate` removed.
    truncated: tuple[int, int] = (0, 0)


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Terminal event of a sequence that never started."""

    rid: int
    failure: Failure


# Structs made for every token hold no cycles, so the garbage collector need not track them.
class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampled token: its bytes, its natural log-probability, and the most likely tokens at its position, best first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token of a prompt: its id, bytes, natural log-probability, rank from 1, and the most likely tokens at its
    position.

    The most likely tokens are sorted best first. A prompt's first token has rank 0 and the log-probability NaN.
    """

    id: int
    token: bytes
    logprob: float
    rank: int
    top: tuple[tuple[int, bytes, float], ...] = ()


class PromptPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requested data of a prompt: all ids, or the next log-probabilities."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[PromptLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Usage of one sequence. Times are milliseconds spent queued, prefilling and decoding.

    `prompt` includes the tokens of media, which are also reported by kind.
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    # Number of drafted tokens that came from the request's `prediction`.
    predicted: int = 0
    # Number of drafted tokens from the request's `prediction` that were accepted.
    accepted: int = 0
    # Number of prompt tokens that a sparse prefill kept; 0 without a sparse prefill.
    kept: int = 0
    # Number of the cached tokens that were read from disk.
    restored: int = 0
    # Numbers of all drafted tokens, and of those that were accepted.
    drafted: int = 0
    drafts_accepted: int = 0
    # How often the sequence was preempted for memory, and how often it waited for its grammar, and the time in both.
    preemptions: int = 0
    grammar_waits: int = 0
    paused_ms: float = 0.0
    # Time in which the worker left the GPU to the display while the sequence was there.
    rested_ms: float = 0.0


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tool call that a TOOL_* delta belongs to. `name` is set on TOOL_BEGIN only."""

    index: int
    call_id: str = ""
    name: str = ""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one sequence in one step.

    `token_ids` are the sampled ids of the text so far: a successor that gets their concatenation as `Generate.resume`
    continues with exactly the next character. With `finish`, `usage` is set and, for ERROR, `failure`. `data` is the
    whole answer to an `EmbedPrompt` or a `ScorePrompt`, in the delta that ends the sequence: float32 numbers,
    little-endian, one vector after another, or one score per pair. For `questions`, it precedes that delta: one
    log-probability per label, NaN for the labels of a question that does not fit the context. For a `SpeechPrompt`,
    `data` is the next part of the audio file; for a `TranscribePrompt`, it is a `TranscriptPart`. For both audio
    prompts, `token_ids` are those of `text`, or `SPOKEN_TOKENS_PER_S` zeros per second: a successor computes everything
    again, and omits the output that `Generate.resume` covers.
    """

    rid: int
    kind: DeltaKind = DeltaKind.TEXT
    text: str = ""
    token_ids: tuple[int, ...] = ()
    tool: ToolCallDelta | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    usage: Usage | None = None
    failure: Failure | None = None
    # The stop string that ended the sequence, if any.
    stop: str = ""
    data: bytes = b""
    # Data of the prompt. Its delta contains nothing else, and precedes all output except an echo.
    prompt: PromptPart | None = None
    # Sampled ids without text, in the delta with `finish`: the ids of a stop string, and the end-of-sequence token.
    # Together with all `token_ids` they make up `usage.completion`.
    ending_ids: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Output of one engine step. `stats` is added about every 100 ms."""

    epoch: int
    step_seq: int
    deltas: list[Delta]
    stats: Stats | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Number of prompt tokens processed so far, `cached` of which came from the cache, `elapsed_ms` after the prefill
    began. Also a keep-alive during prefill.
    """

    rid: int
    processed: int
    total: int
    cached: int = 0
    elapsed_ms: int = 0


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """Answer to `Tokenize` and `Detokenize`."""

    rid: int
    count: int
    ids: tuple[int, ...] = ()
    text: str = ""


class MissCode(StrEnum):
    """Cause for which tokens of a prompt were not taken from the prefix cache.

    The first codes name what was different in the text, the others what became of the KV of equal text.
    """

    SYSTEM = "system_changed"
    TOOLS = "tools_changed"
    TOOL_ORDER = "tools_reordered"
    SETTINGS = "settings_changed"
    MESSAGE = "message_changed"
    DATE = "date_changed"
    MEDIA = "media_changed"
    # The template, or the client, left out the reasoning of an earlier answer.
    THOUGHTS = "thoughts_dropped"
    THOUGHTS_UNSENT = "thoughts_not_sent"
    TRUNCATED = "turns_truncated"
    TEMPLATE = "template_changed"
    TEXT = "text_changed"
    SALT = "other_key"
    ADAPTER = "adapter_changed"
    EVICTED = "evicted"
    MEMORY = "memory_shrank"
    TOO_LARGE = "too_large"
    CHECKPOINT = "no_checkpoint"
    DISK = "disk_failed"
    SCORED = "prompt_scored"
    SPARSE = "sparse_prefill"
    NOT_STORED = "not_stored"
    OFF = "cache_off"
    NEW = "new_prompt"


class MissCause(msgspec.Struct, frozen=True, array_like=True):
    """One cause of a miss, the number of `tokens` that it cost, and the position `at` of the first of them.

    `code` is a `MissCode`. What differs is in message `message` of this role (-1 if unknown): `old` and `new` are
    excerpts of both texts, or hashes of them. `by` is the rid of the request for which KV was evicted `ago_s` before.
    """

    code: str
    tokens: int
    at: int = 0
    message: int = -1
    role: str = ""
    old: str = ""
    new: str = ""
    by: int = 0
    ago_s: float = 0.0


class Explained(msgspec.Struct, frozen=True, array_like=True, tag=46):
    """Answer to `Explain`. With `prompt` 0 the worker does not know the request any more.

    Of the `prompt` tokens `reused` came from the cache, `restored` of them from disk. `other` is the rid of the
    request that was compared, which arrived `age_s` earlier and whose text begins with the same `common` tokens; 0 if
    there is none.
    """

    rid: int
    prompt: int = 0
    reused: int = 0
    restored: int = 0
    common: int = 0
    other: int = 0
    age_s: float = 0.0
    causes: tuple[MissCause, ...] = ()


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """Answer to `Ping`, from a thread that the engine cannot block. `step_age_ms` is 0 when idle."""

    seq: int
    t_ns: int
    stats: Stats


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Message that the worker is empty; `aborted` sequences did not finish in time."""

    epoch: int
    aborted: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """Last message of a worker."""

    epoch: int
    reason: str
    failure: Failure | None = None


class AdaptersSet(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """Answer to `SetAdapters`: the adapters that replace those in `Ready`, and the size of all weights including
    adapters.
    """

    epoch: int
    call_id: int
    adapters: tuple[AdapterInfo, ...] = ()
    weights_bytes: int = 0


Up = (
    Hello
    | Loading
    | Ready
    | Accepted
    | Rejected
    | Step
    | Progress
    | Tokenized
    | Pong
    | Drained
    | Goodbye
    | AdaptersSet
    | Explained
)
