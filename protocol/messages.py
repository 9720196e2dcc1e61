"""Every message between the gateway and its workers; `model_info` has parts of them.

A message is a msgpack array: an integer tag, then the fields in order. Fields are only ever appended, with a default;
types never change and tags are never reused, so that each minor version reads every other of the same major.
`tests/protocol/golden` holds the frames of every released minor.

One generated sequence has one `rid`: a request with `n` choices or a list of prompts becomes several `Generate`s.
Every `Generate` is answered by exactly one terminal event: a `Rejected`, or a `Delta` with `finish` set.
"""

from enum import IntEnum
from typing import Any, Final

import msgspec

from protocol.failures import Failure
from protocol.model_info import AdapterInfo, AudioInfo, EmbeddingInfo, GroupInfo, MediaInfo
from protocol.stats import Stats

MAJOR = 1
MINOR = 1
# Range of `Sampling.repetition_penalty`: a logit divided by 1e-38 is infinite, and its log-probability no number.
REPETITION_PENALTY_MIN: Final = 0.01
REPETITION_PENALTY_MAX: Final = 1e6


# -- generation requests ---------------------------------------------------------------------------------------------


class Media(msgspec.Struct, frozen=True, array_like=True):
    """An image, video or audio clip of a prompt, as the client's bytes: neither resized nor encoded again.

    `kind` is `image`, `video` or `audio`; `digest` is the BLAKE2b-256 of `data`, made by the gateway. `options` are
    what the request sets of `min_pixels`, `max_pixels`, `fps` and `num_frames`. A `frames` of n tells that `data` is a
    list of n JPEG files, each after its length in 4 bytes, big-endian. `param` is the part's path, for a refusal.
    """

    kind: str
    digest: bytes
    data: bytes
    options: dict[str, int | float] = {}
    param: str = ""


class ChatPrompt(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Messages for the chat template, already in the shape templates expect (`role`, `content`, …).

    `content` is text, or, in a message with media, a list of `{"type": "text", "text": …}` and
    `{"type": "image" | "video" | "audio", "media": i}` in the client's order, where `i` is an index of `media`.
    `must_call` wants tool calls and nothing else after the reasoning, of `callable_tools` where these are named.
    `strict_tools` names tools whose arguments must fit their schema also when nothing must be called.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    template_kwargs: dict[str, Any] = {}
    # Continue the last assistant message instead of opening a new one.
    continue_final: bool = False
    # Whether to reason, None for as the template does by default; and how much (`low`, `medium`, `high`), where known.
    thinking: bool | None = None
    effort: str = ""
    must_call: bool = False
    callable_tools: tuple[str, ...] = ()
    # End the answer after its first call.
    one_call: bool = False
    strict_tools: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()


class Infill(msgspec.Struct, frozen=True, array_like=True):
    """The text behind what is to be filled in, the beginning of that, and other files as (name, text)."""

    suffix: str = ""
    middle: str = ""
    files: tuple[tuple[str, str], ...] = ()


class TextPrompt(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Plain text, encoded as the tokenizer does by default: with its BOS, if it adds one and `adds_special` is true.

    With `infill` it is the text before what is to be filled in, by the tokens that the model has for it.
    """

    text: str
    infill: Infill | None = None
    adds_special: bool = True


class TokensPrompt(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Token ids, checked against the vocabulary by the worker."""

    ids: tuple[int, ...]


class EmbedPrompt(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Texts, or token ids as they are, to make an embedding of each.

    `prompt_name` is one of the model's prompts, put before each text; with `is_query` or `is_document` and no name it
    is the model's prompt for these, where it has one. `dimensions` 0 is all. `truncate` is the most tokens of an input,
    of which the rest is cut off: 0 is never, and then a longer one is refused; -1 is as many as the model takes.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    prompt_name: str = ""
    is_query: bool = False
    is_document: bool = False
    dimensions: int = 0
    truncate: int = 0


class ScorePrompt(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Pairs of a query and a document, to score how well the document answers the query.

    One query is for all documents, else there are as many. `truncate` is as in `EmbedPrompt`, of a whole pair;
    `truncate_document` of the document alone, where 0 is no limit. Both cut off documents only. `instruction` is for
    models that take one. `params` are what the client calls queries and documents, for a refusal.
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    instruction: str = ""
    truncate: int = 0
    truncate_document: int = 0
    params: tuple[str, str] = ("query", "documents")


class TranscribePrompt(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A clip to write down what is said in it, or with `is_translated` that in English.

    `data` is the client's file. `language` is an ISO 639-1 code, empty is as heard; `text` is what was said before, or
    words that may come. `has_words` wants the times of words. A clip of more than `most_s` seconds is refused.
    """

    data: bytes
    language: str = ""
    text: str = ""
    is_translated: bool = False
    has_words: bool = False
    most_s: float = 0.0


class SpeechPrompt(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A text to speak, in one of the formats of files of `AudioInfo`.

    `voice` is one of the model's, empty is its own choice; `instructions` are for models that take some. Speech of more
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

    Order: bias, penalties and limits of ids on logits, then temperature, top_n_sigma, min_p, top_k, top_p over what
    those left, as vLLM does, typical_p, and XTC. At temperature 0 the best token is taken, whatever the filters say.
    `repetition_penalty` looks at prompt and output (CTRL, arXiv:1909.05858); `presence_penalty` and
    `frequency_penalty` at the output only, as OpenAI defines them. `top_k` 0 and `top_p` 1 mean off.
    The token at output position p is drawn with a key derived from (seed, p) and nothing else.
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
    # Newest tokens that the three penalties look at; 0 is all.
    penalty_window: int = 0
    typical_p: float = 1.0
    # Standard deviations below the best logit; 0 is off.
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    # DRY; a multiplier of 0 is off, a window of 0 all of the context.
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = 0
    # Texts; a token that holds one ends a repetition.
    dry_breakers: tuple[str, ...] = ()
    # Neither an end-of-sequence token, a stop id nor a stop string ends the output before.
    min_tokens: int = 0
    # Ids that end the output as its end-of-sequence tokens do.
    stop_ids: tuple[int, ...] = ()
    # The only ids that may come; empty is all.
    allowed_ids: tuple[int, ...] = ()
    # Texts that may not come.
    bad_words: tuple[str, ...] = ()
    # Texts, each of whose tokens gets a bias.
    bias_texts: tuple[tuple[str, float], ...] = ()


class ConstraintKind(IntEnum):
    """Language of a `Constraint`'s text."""

    JSON_OBJECT = 0
    JSON_SCHEMA = 1
    REGEX = 2
    # Lark as llguidance takes it, special tokens included, or GBNF.
    GRAMMAR = 3
    # A JSON list of strings.
    CHOICE = 4


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Constraint on the answer's text. `after_reasoning` leaves a reasoning block that comes before the answer free.

    `param` is what the client calls it, for the message of a refusal. A schema that is not `is_strict` is held as far
    as it can be.
    """

    kind: ConstraintKind
    text: str = ""
    after_reasoning: bool = False
    param: str = "response_format"
    is_strict: bool = True


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The gateway's answer to `Hello`. A new `boot` tells a surviving worker that the gateway was restarted."""

    proto_minor: int
    boot: int
    heartbeat_s: float


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Generate one sequence, compute the vectors of an `EmbedPrompt` or the scores of a `ScorePrompt`, hear or speak.

    `max_tokens` None means up to the end of the context; larger than what is left is clamped.
    `top_logprobs` None means no logprobs, 0 means only the sampled token's. `echo` sends the prompt's text first, and
    with `top_logprobs` an entry for each of its tokens; that of the first is NaN.
    `deadline_ms` is relative to receipt; 0 means none. Lower `priority` runs first; of equal ones one of each `tenant`
    in turn, and a tenant's in order of arrival. `want_progress` asks for `Progress` while the prompt is processed.
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
    # Ids that an earlier worker has sampled for this request and whose output the client has: go on after them.
    resume: tuple[int, ...] = ()
    # Reasoning tokens after which the block is closed in the model's own way; None means no limit.
    thinking_budget: int | None = None
    constraint: Constraint | None = None
    # Rows of equal priority run in turn by tenant: a digest of the key's name; empty without a key.
    tenant: str = ""
    # The most tokens of a draft; 0 is no drafts, None is as the model's settings say.
    most_drafted: int | None = None
    # Text that the client expects much of the output to be.
    prediction: str = ""
    # Whether the stop string, or the text of the stop id, that ends the output is part of it.
    includes_stop: bool = False
    # The name of the adapter that it is generated with; empty is the base model.
    adapter: str = ""
    # A sparse prefill: the part of the prompt's tokens to keep, 0 for the model's setting; None is to run them all.
    sparse_keep: float | None = None
    # Where the prompt does not fit: 0 refuses it, -1 leaves out the oldest turns of a chat or the first tokens of a
    # text; more than 0 are the last tokens of a text that are kept, even if more would fit.
    truncate: int = 0
    # Turns and tokens that an earlier worker has left out of it, which are to be left out again; None is not known.
    left_out: tuple[int, int] | None = None
    # Special tokens of the output are part of its text.
    shows_special: bool = False
    # With `truncate`, of a chat too the first tokens are left out as of a text, and not its oldest turns.
    cuts_tokens: bool = False
    # The ids of the prompt are sent before its answer.
    prompt_ids: bool = False
    # Of each token of the prompt its log-probability and rank, and so many of the likeliest tokens there, are sent
    # before its answer; None is not wanted. The client has so many entries of an earlier worker: the others are sent.
    prompt_logprobs: int | None = None
    prompt_scored: int = 0
    # Of `echo` with `top_logprobs`: the client has the text and so many entries of an earlier worker.
    echo_scored: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Stop these sequences, each of which still gets its terminal event, and forget these questions. Idempotent."""

    rids: tuple[int, ...]
    reason: str = "client"


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Count the tokens of a prompt, and send them if `want_ids`. Answered by `Tokenized` or `Rejected`."""

    rid: int
    prompt: Prompt
    want_ids: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The text of ids. Answered by `Tokenized` or `Rejected`."""

    rid: int
    ids: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A heartbeat, answered by `Pong`."""

    seq: int
    t_ns: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Take no new work, finish what runs until the deadline, abort the rest, answer `Drained`."""

    deadline_s: float


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Abort everything, free the model and exit 0."""

    reason: str = "asked"


class Dump(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Write the stacks of all threads to stderr."""

    call_id: int


class SetMemory(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Stay within another share of memory from now on. What is too much is let go of at once: free buffers, then cached
    prefixes, then running rows make room for each other; no row is lost.

    `kv_part` and `cache_part` (0 to 1) leave a part of what the share would allow them unused, under pressure.
    """

    share_bytes: int
    kv_part: float = 1.0
    cache_part: float = 1.0


class SetLogLevel(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Log from this level on: `debug`, `info`, `warning`, `error` or `critical`."""

    level: str


class SetPace(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Leave a display its part of the GPU from now on, for workers of minor 1 and up. No token depends on it.

    `duty` is the part of the time in which the model computes. A tick that prefills takes at most `tick_ms`, and
    `chunk` prompt tokens of a row; 0 is as without.
    """

    duty: float = 1.0
    tick_ms: int = 0
    chunk: int = 0


class SetAdapters(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Have these adapters, by name and folder, and no others: new ones are loaded, and what runs with one that goes
    finishes with it. Answered by `AdaptersSet` of the same `call_id`."""

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
    """The first message of a worker, and its answer to a new `Welcome.boot`. Frozen: fields are only appended."""

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
    """The model is loaded and warm. `modalities` are those of a prompt beside text: `image`, `video`, `audio`.

    `kind` is one of `protocol.kinds`; empty from a worker that does not say, which generates text.
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
    # How rows share a forward pass: `together`, `equal` or `single`; empty from a worker that does not say. The reason
    # is empty where nothing had to be given up.
    lane: str = ""
    lane_reason: str = ""
    modalities: tuple[str, ...] = ()
    # None of a model without towers, and from a worker that does not say.
    media: MediaInfo | None = None
    # `auto`, or `off` and the reason; empty from a worker that does not say.
    speculation: str = ""
    kind: str = ""
    # Of a model of embeddings.
    embedding: EmbeddingInfo | None = None
    # Those of its specification, be they served or not.
    adapters: tuple[AdapterInfo, ...] = ()
    # Of a model that several processes run together.
    group: GroupInfo | None = None
    # Bits of a number of its KV; 0 is as the model computes it.
    kv_bits: int = 0
    # Of a model of audio.
    audio: AudioInfo | None = None
    # `kernel`, or `mlx` with the reason; empty from a worker that does not say.
    attention: str = ""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """The prompt was tokenized and queued. `relaxed` names what the grammar of its answer leaves out of a schema, what
    is done in another way than the request says, and what the model does not compute exactly, such as `kv-bits-8`."""

    rid: int
    prompt_tokens: int
    relaxed: tuple[str, ...] = ()
    # Turns and tokens of the prompt that `truncate` has left out.
    left_out: tuple[int, int] = (0, 0)


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """Terminal: the sequence never started."""

    rid: int
    failure: Failure


# What is made for every token holds no cycles: the garbage collector need not look at it.
class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token: its bytes, its log-probability (natural), and the likeliest tokens, best first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of a prompt: its id, bytes, log-probability (natural) and rank, which is 1 of the likeliest, and the
    likeliest tokens there, best first. The first of a prompt has the rank 0, and no number as its log-probability."""

    id: int
    token: bytes
    logprob: float
    rank: int
    top: tuple[tuple[int, bytes, float], ...] = ()


class PromptPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of what a request wants to know of its prompt: all ids, or the next log-probabilities."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[PromptLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Usage of one sequence. Times are milliseconds spent queued, prefilling and decoding.

    `prompt` includes the tokens of media, which are also told by kind.
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
    # Tokens of the request's `prediction` that were tried, and of these the ones that were right.
    predicted: int = 0
    accepted: int = 0
    # Tokens of the prompt that a sparse prefill kept; 0 is that there was none.
    kept: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tool call that a TOOL_* delta belongs to. `name` is set on TOOL_BEGIN only."""

    index: int
    call_id: str = ""
    name: str = ""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one sequence in one step.

    `token_ids` are the sampled ids that the text so far accounts for: a successor that is given their concatenation as
    `Generate.resume` goes on with exactly the next character. With `finish`, `usage` is set and, for ERROR, `failure`.
    `data` is the whole answer to an `EmbedPrompt` or a `ScorePrompt`, in the delta that ends it: float32 numbers,
    little-endian, the vectors one after the other, or one score a pair. For a `SpeechPrompt` it is the next part of a
    file, for a `TranscribePrompt` a `transcript.Part`. Then `token_ids` are those of `text`, or zeros, `SPOKEN_RATE` a
    second: a successor computes all again, and leaves out what `Generate.resume` has.
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
    # The stop string that ended the sequence, if one did.
    stop: str = ""
    data: bytes = b""
    # Alone in its delta, and before all output but an echo.
    prompt: PromptPart | None = None
    # With `finish`, the sampled ids that no text accounts for: those of a stop string, and the end-of-sequence token.
    # Behind all `token_ids` they make up `usage.completion`.
    ending_ids: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """All output of one engine step. `stats` comes along every 100 ms or so."""

    epoch: int
    step_seq: int
    deltas: list[Delta]
    stats: Stats | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """Prompt tokens processed so far, `cached` of them not computed; the proof of life behind a keep-alive."""

    rid: int
    processed: int
    total: int
    cached: int = 0


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """The answer to `Tokenize` and `Detokenize`."""

    rid: int
    count: int
    ids: tuple[int, ...] = ()
    text: str = ""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """The answer to `Ping`, from a thread that the engine cannot block. `step_age_ms` is 0 when idle."""

    seq: int
    t_ns: int
    stats: Stats


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The worker is empty; `aborted` sequences did not finish in time."""

    epoch: int
    aborted: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """The last message of a worker."""

    epoch: int
    reason: str
    failure: Failure | None = None


class AdaptersSet(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """The adapters from now on, in place of those of `Ready`, and the bytes of all weights with them."""

    epoch: int
    call_id: int
    adapters: tuple[AdapterInfo, ...] = ()
    weights_bytes: int = 0


Up = (
    Hello | Loading | Ready | Accepted | Rejected | Step | Progress | Tokenized | Pong | Drained | Goodbye | AdaptersSet
)
