"""All messages between the gateway and its workers; `model_info` has parts of them.

A message is a msgpack array: an integer tag, then the fields in order. Fields are only ever appended, with a default;
types never change and tags are never reused, so that each minor version reads every other of the same major.
`tests/protocol/golden` holds the frames of every released minor.

One generated sequence has one `rid`: a request with `n` choices or a list of prompts becomes several `Generate`s. Every
`Generate` is answered by exactly one terminal event: a `Rejected`, or a `Delta` with `finish` set.
"""

from enum import IntEnum
from typing import Any, Final

import msgspec

from protocol.failures import Failure
from protocol.model_info import AdapterInfo, AudioInfo, EmbeddingInfo, GroupInfo, MediaInfo
from protocol.stats import Stats

MAJOR = 1
MINOR = 1
# Range of `Sampling.repetition_penalty`: a logit divided by 1e-38 is infinite, and its log-probability NaN.
REPETITION_PENALTY_MIN: Final = 0.01
REPETITION_PENALTY_MAX: Final = 1e6


# -- generation requests ---------------------------------------------------------------------------------------------


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
    "video" | "audio", "media": i}` in the client's order, where `i` is an index of `media`. `must_call` requires tool
    calls and nothing else after the reasoning, of `callable_tools` if any are named. `strict_tools` names tools whose
    arguments must always fit their schema, even if no call is required.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    template_kwargs: dict[str, Any] = {}
    # Continue the last assistant message instead of opening a new one.
    continue_final: bool = False
    # Whether to reason, None for the template's default; and the effort (`low`, `medium`, `high`), if known.
    thinking: bool | None = None
    effort: str = ""
    must_call: bool = False
    callable_tools: tuple[str, ...] = ()
    # The answer ends after its first call.
    one_call: bool = False
    strict_tools: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()


class Infill(msgspec.Struct, frozen=True, array_like=True):
    """Fill-in-the-middle input: the text after the gap, the beginning of the gap's text, and files as (name, text)."""

    suffix: str = ""
    middle: str = ""
    files: tuple[tuple[str, str], ...] = ()


class TextPrompt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Plain text, encoded with the tokenizer's defaults: with its BOS, if it adds one and `adds_special` is true.

    With `infill`, it is the text before the gap, which the model fills in by its fill-in-the-middle tokens.
    """

    text: str
    infill: Infill | None = None
    adds_special: bool = True


class TokensPrompt(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Token ids, which the worker checks against the vocabulary."""

    ids: tuple[int, ...]


class EmbedPrompt(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Texts, or token ids, each of which gets an embedding.

    `prompt_name` is one of the model's prompts, written before each text; with `is_query` or `is_document` and no name
    it is the model's prompt for these, if there is one. `dimensions` 0 means all. `truncate` is the maximum number of
    tokens of an input, the rest of which is cut off: 0 refuses longer inputs, -1 is the model's own limit.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    prompt_name: str = ""
    is_query: bool = False
    is_document: bool = False
    dimensions: int = 0
    truncate: int = 0


class ScorePrompt(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Pairs of a query and a document, to score how well the document answers the query.

    A single query applies to all documents, otherwise there are as many. `truncate` is as in `EmbedPrompt`, for a whole
    pair; `truncate_document` is for the document alone, with 0 for no limit. Both cut off documents only. `instruction`
    is for models that take one. `params` are the client's names of queries and documents, for error messages.
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

    `voice` is one of the model's, empty for its default; `instructions` are for models that take some. Speech of more
    than `most_s` seconds fails.
    """

    text: str
    voice: str = ""
    speed: float = 1.0
    format: str = "wav"
    instructions: str = ""
    most_s: float = 0.0


Prompt = ChatPrompt | TextPrompt | TokensPrompt | EmbedPrompt | ScorePrompt | TranscribePrompt | SpeechPrompt


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters. The gateway validates ranges; the worker validates ids against its vocabulary.

    Order: bias, penalties and limits of ids on logits, then temperature, top_n_sigma, min_p, top_k, top_p over the
    remaining tokens (as in vLLM), typical_p, and XTC. At temperature 0 the best token is taken, regardless of the
    filters. `repetition_penalty` applies to prompt and output (CTRL, arXiv:1909.05858); `presence_penalty` and
    `frequency_penalty` to the output only, as OpenAI defines them. `top_k` 0 and `top_p` 1 mean off. The token at
    output position p is drawn with a key derived from (seed, p) and nothing else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    ignore_eos: bool = False
    # Number of newest tokens that the three penalties apply to; 0 means all.
    penalty_window: int = 0
    typical_p: float = 1.0
    # Maximum standard deviations below the best logit; 0 means off.
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    # DRY penalty; a multiplier of 0 means off, a window of 0 the whole context.
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = 0
    # Texts; a token that contains one ends a repetition.
    dry_breakers: tuple[str, ...] = ()
    # Tokens before which neither an end-of-sequence token, a stop id nor a stop string ends the output.
    min_tokens: int = 0
    # Ids that end the output like its end-of-sequence tokens.
    stop_ids: tuple[int, ...] = ()
    # The only allowed ids; empty means all.
    allowed_ids: tuple[int, ...] = ()
    # Forbidden texts.
    bad_words: tuple[str, ...] = ()
    # Texts with a bias for each of their tokens.
    bias_texts: tuple[tuple[str, float], ...] = ()


class ConstraintKind(IntEnum):
    """Language of a `Constraint`'s text."""

    JSON_OBJECT = 0
    JSON_SCHEMA = 1
    REGEX = 2
    # Lark in llguidance's dialect, special tokens included, or GBNF.
    GRAMMAR = 3
    # A JSON list of strings.
    CHOICE = 4


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Constraint on the answer's text. `after_reasoning` exempts a reasoning block before the answer.

    `param` is the client's name of it, for error messages. A schema without `is_strict` is enforced as far as possible.
    """

    kind: ConstraintKind
    text: str = ""
    after_reasoning: bool = False
    param: str = "response_format"
    is_strict: bool = True


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer of the gateway to `Hello`. A new `boot` shows a surviving worker that the gateway was restarted."""

    proto_minor: int
    boot: int
    heartbeat_s: float


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request to generate one sequence, to compute embeddings or scores, to transcribe or to speak.

    `max_tokens` None means up to the end of the context; larger values are clamped to it. `top_logprobs` None means no
    logprobs, 0 means only the sampled token's. `echo` sends the prompt's text first, and with `top_logprobs` an entry
    for each of its tokens; the first entry is NaN. `deadline_ms` is relative to receipt; 0 means none. Lower `priority`
    runs first; at equal priority tenants take turns, and each tenant's requests run in order of arrival.
    `want_progress` requests `Progress` while the prompt is processed.
    """

    rid: int
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    echo: bool = False
    priority: int = 0
    deadline_ms: int = 0
    want_progress: bool = False
    trace: str = ""
    # Requests share cached prefixes only with others of the same salt.
    cache_salt: str = ""
    # Ids that an earlier worker sampled for this request and whose output the client has: continue after them.
    resume: tuple[int, ...] = ()
    # Number of reasoning tokens after which the block is closed with the model's own markup; None means no limit.
    thinking_budget: int | None = None
    constraint: Constraint | None = None
    # Digest of the API key's name, empty without a key. Tenants take turns at equal priority.
    tenant: str = ""
    # Maximum tokens of a draft; 0 means no drafts, None the model's setting.
    most_drafted: int | None = None
    # Text that the client expects in much of the output.
    prediction: str = ""
    # Whether the output includes the stop string, or the text of the stop id, that ends it.
    includes_stop: bool = False
    # Name of the adapter; empty means the base model.
    adapter: str = ""
    # Sparse prefill: the share of the prompt's tokens to keep, 0 for the model's setting; None runs all tokens.
    sparse_keep: float | None = None
    # Truncation of a prompt that does not fit: 0 refuses it, -1 drops the oldest turns of a chat or the first tokens of
    # a text; a positive number keeps that many last tokens of a text, even if more would fit.
    truncate: int = 0
    # Turns and tokens that an earlier worker truncated, which must be truncated again; None if unknown.
    left_out: tuple[int, int] | None = None
    # Whether special tokens are part of the output's text.
    shows_special: bool = False
    # Whether `truncate` removes a chat's first tokens instead of its oldest turns.
    cuts_tokens: bool = False
    # Whether the ids of the prompt are sent before its answer.
    prompt_ids: bool = False
    # Number of top tokens per token of the prompt, sent before its answer with log-probability and rank; None means
    # none. The client already has `prompt_scored` entries of an earlier worker; only the others are sent.
    prompt_logprobs: int | None = None
    prompt_scored: int = 0
    # Number of `echo` entries with `top_logprobs` that the client has of an earlier worker, with the text.
    echo_scored: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Command to abort these sequences, each of which still gets its terminal event, and these calls. Idempotent."""

    rids: tuple[int, ...]
    reason: str = "client"


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Call to count the tokens of a prompt, and to send them if `want_ids`. Answered by `Tokenized` or `Rejected`."""

    rid: int
    prompt: Prompt
    want_ids: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Call to decode ids to text. Answered by `Tokenized` or `Rejected`."""

    rid: int
    ids: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Heartbeat of the gateway, answered by `Pong`."""

    seq: int
    t_ns: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Command to refuse new work, finish running work until the deadline, abort the rest, and answer `Drained`."""

    deadline_s: float


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Command to abort everything, free the model and exit 0."""

    reason: str = "asked"


class Dump(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Command to write the stacks of all threads to stderr."""

    call_id: int


class SetMemory(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Command to use another share of memory from now on. Memory above it is freed at once: free buffers, then cached
    prefixes, then running rows are preempted; no row is lost.

    `kv_part` and `cache_part` (0 to 1) leave a part of the share's limits unused, under memory pressure.
    """

    share_bytes: int
    kv_part: float = 1.0
    cache_part: float = 1.0


class SetLogLevel(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Command to log from this level on: `debug`, `info`, `warning`, `error` or `critical`."""

    level: str


class SetPace(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Command to leave a display its share of the GPU, for workers of minor 1 and up. It affects no token.

    `duty` is the fraction of time in which the model computes. A tick with prefill takes at most `tick_ms`, and `chunk`
    prompt tokens of a row; 0 means no limit.
    """

    duty: float = 1.0
    tick_ms: int = 0
    chunk: int = 0


class SetAdapters(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Command to serve exactly these adapters, by name and folder. Rows with a removed adapter still finish.

    Answered by `AdaptersSet` with the same `call_id`.
    """

    call_id: int
    adapters: tuple[tuple[str, str], ...] = ()


Down = (
    Welcome
    | Generate
    | Abort
    | Detokenize
    | Tokenize
    | Ping
    | Drain
    | Shutdown
    | Dump
    | SetMemory
    | SetLogLevel
    | SetPace
    | SetAdapters
)


# -- upstream --------------------------------------------------------------------------------------------------------


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
    """First message of a worker, and its answer to a new `Welcome.boot`. Frozen: fields are only appended."""

    worker: str
    epoch: int
    pid: int
    proto_major: int
    proto_minor: int
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
    """Message that the model is loaded and warm. `modalities` are `image`, `video` and `audio` if prompts may have
    them.

    `kind` is one of `protocol.kinds`; empty from older workers, which generate text.
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
    # Batch mode of rows: `together`, `equal` or `single`; empty from older workers. An empty reason means no
    # limitation.
    lane: str = ""
    lane_reason: str = ""
    modalities: tuple[str, ...] = ()
    # None for a model without towers, and from older workers.
    media: MediaInfo | None = None
    # `auto`, or `off` and the reason; empty from older workers.
    speculation: str = ""
    kind: str = ""
    # Set for embedding models.
    embedding: EmbeddingInfo | None = None
    # Adapters of its specification, served or not.
    adapters: tuple[AdapterInfo, ...] = ()
    # Set for a model that several processes run together.
    group: GroupInfo | None = None
    # Bits per number of its KV; 0 means the model's own precision.
    kv_bits: int = 0
    # Set for audio models.
    audio: AudioInfo | None = None
    # `kernel`, or `mlx` with the reason; empty from a worker that does not say.
    attention: str = ""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Message that the prompt was tokenized and queued.

    `relaxed` names the parts of a schema that the grammar does not enforce, other deviations from the request, and
    inexact computation, such as `kv-bits-8`.
    """

    rid: int
    prompt_tokens: int
    relaxed: tuple[str, ...] = ()
    # Numbers of turns and tokens of the prompt that `truncate` removed.
    left_out: tuple[int, int] = (0, 0)


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Terminal event of a sequence that never started."""

    rid: int
    failure: Failure


# Structs made for every token hold no cycles, so the garbage collector need not track them.
class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampled token: its bytes, its log-probability (natural), and the most likely tokens, best first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token of a prompt: its id, bytes, log-probability (natural), rank from 1, and the most likely tokens there.

    Top tokens are sorted best first. A prompt's first token has rank 0, and NaN as its log-probability.
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
    # Number of tokens of the request's `prediction` that were drafted, and of those accepted.
    predicted: int = 0
    accepted: int = 0
    # Number of prompt tokens that a sparse prefill kept; 0 without one.
    kept: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tool call that a TOOL_* delta belongs to. `name` is set on TOOL_BEGIN only."""

    index: int
    call_id: str = ""
    name: str = ""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one sequence in one step.

    `token_ids` are the sampled ids of the text so far: a successor that gets their concatenation as `Generate.resume`
    continues with exactly the next character. With `finish`, `usage` is set and, for ERROR, `failure`. `data` is the
    whole answer to an `EmbedPrompt` or a `ScorePrompt`, in the delta that ends it: float32 numbers, little-endian, one
    vector after another, or one score per pair. For a `SpeechPrompt` it is the next part of a file, for a
    `TranscribePrompt` a `TranscriptPart`. Then `token_ids` are those of `text`, or zeros, `SPOKEN_RATE` a second: a
    successor computes everything again, and omits what `Generate.resume` has.
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
    # Data of the prompt, in a delta without anything else, before all output except an echo.
    prompt: PromptPart | None = None
    # Sampled ids without text, in the delta with `finish`: those of a stop string, and the end-of-sequence token.
    # Together with all `token_ids` they make up `usage.completion`.
    ending_ids: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """Output of one engine step. `stats` is added about every 100 ms."""

    epoch: int
    step_seq: int
    deltas: list[Delta]
    stats: Stats | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Prompt tokens processed so far, of which `cached` were not computed; a keep-alive while a prompt is processed."""

    rid: int
    processed: int
    total: int
    cached: int = 0


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """Answer to `Tokenize` and `Detokenize`."""

    rid: int
    count: int
    ids: tuple[int, ...] = ()
    text: str = ""


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
    """Adapters from now on, which replace those of `Ready`, and the bytes of all weights including them."""

    epoch: int
    call_id: int
    adapters: tuple[AdapterInfo, ...] = ()
    weights_bytes: int = 0


Up = (
    Hello | Loading | Ready | Accepted | Rejected | Step | Progress | Tokenized | Pong | Drained | Goodbye | AdaptersSet
)
