"""Messages from the gateway to its workers.

A message is a msgpack array: an integer tag, then the fields in order. A change that the other side may ignore, such as
an appended field with a default that affects no output, keeps `protocol.PROTOCOL`; any other change raises it.
`Welcome`, `Shutdown` and `Hello` are understood by every number. `tests/protocol/golden` has the frames of this number.

One generated sequence has one `rid`: a request with `n` choices or a list of prompts becomes several `Generate`s. Every
`Generate` is answered by exactly one terminal event: a `Rejected`, or a `Delta` with `finish` set.

Prompts of `Generate` and `Tokenize`.
"""

from enum import IntEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta


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


# Ranges of sampling parameters. The settings and the bodies of all dialects have these types, and the decoder of a
# worker refuses other values. A dialect has a type of its own only where it gives another value a meaning, such as -1.
TOKENS_MAX: Final = 1 << 40
TOP_N_SIGMA_MAX: Final = 100
TokenCount = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
AnswerTokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
# More tokens than the vocabulary has are all of it, as in vLLM and transformers.
TopK = TokenCount
Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TypicalP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# A logit divided by 1e-38 is infinite, and its log-probability NaN.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=1e6)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopNSigma = Annotated[float, Meta(ge=0, le=TOP_N_SIGMA_MAX)]
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
DryBase = Annotated[float, Meta(ge=1, le=4)]
DryLength = Annotated[int, Meta(ge=0, le=1024)]
DraftLength = Annotated[int, Meta(ge=0, le=1024)]
# Share of a prompt that a sparse prefill keeps; 0 stands for a default.
SparseKeep = Annotated[float, Meta(ge=0, le=1)]
# Numbers of likeliest tokens. The worker compares them with its vocabulary.
TopTokens = Annotated[int, Meta(ge=0)]
# Priority of the requests of batches, below that of any client's request. A worker computes them only while it has no
# other request.
BATCH_PRIORITY: Final = 1 << 32


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters. The worker validates ids against its vocabulary.

    Order: bias, penalties and limits of ids on logits, then temperature, top_n_sigma, min_p, top_k, top_p over the
    remaining tokens (as in vLLM), typical_p, and XTC. At temperature 0 or top_p 0 the best token is taken, regardless
    of the filters. `repetition_penalty` applies to prompt and output (CTRL, arXiv:1909.05858); `presence_penalty` and
    `frequency_penalty` to the output only, as OpenAI defines them. `top_k` 0 and `top_p` 1 mean off. The token at
    output position p is drawn with a key derived from (seed, p) and nothing else.
    """

    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: TopK = 0
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Bias] = {}
    seed: int = 0
    ignore_eos: bool = False
    # Number of newest tokens to which the three penalties apply; 0 means all.
    penalty_window: TokenCount = 0
    typical_p: TypicalP = 1.0
    # Distance below the best logit, in standard deviations, beyond which tokens are filtered out; 0 means off.
    top_n_sigma: TopNSigma = 0.0
    xtc_probability: Probability = 0.0
    xtc_threshold: Probability = 0.1
    # Strength of the DRY penalty; 0 means off.
    dry_multiplier: DryMultiplier = 0.0
    dry_base: DryBase = 1.75
    dry_allowed_length: DryLength = 2
    # Number of newest tokens that DRY searches for repetitions; 0 means the whole context.
    dry_window: TokenCount = 0
    # Texts that end a repetition for the DRY penalty if a token contains one of them.
    dry_breakers: tuple[str, ...] = ()
    # Number of output tokens before which neither an end-of-sequence token, a stop id nor a stop string ends the
    # output.
    min_tokens: TokenCount = 0
    # Token ids that end the output like an end-of-sequence token.
    stop_ids: tuple[int, ...] = ()
    # Token ids to which the output is restricted; empty means all.
    allowed_ids: tuple[int, ...] = ()
    # Texts that the output must not contain.
    bad_words: tuple[str, ...] = ()
    # Texts, each with a bias that applies to all of its tokens.
    bias_texts: tuple[tuple[str, Bias], ...] = ()


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

    `param` is the client's name of the constraint, for error messages. A schema without `is_strict` is enforced as far
    as possible.
    """

    kind: ConstraintKind
    text: str = ""
    after_reasoning: bool = False
    param: str = "response_format"
    is_strict: bool = True


class LabelledQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Question about a chat. `labels` are the texts of its options, one of which would answer it.

    No label is the beginning of another label.
    """

    text: str
    labels: tuple[str, ...]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer of the gateway to `Hello`. A new `boot` shows a surviving worker that the gateway was restarted.

    `protocol` is `protocol.PROTOCOL`.
    """

    protocol: int
    boot: int
    heartbeat_s: float


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request to generate one sequence, to compute embeddings or scores, to transcribe or to speak.

    `max_tokens` None means up to the end of the context; larger values are clamped to it; 0 without `echo` only
    puts the prompt into the prefix cache. `top_logprobs` None means no logprobs, 0 means only the sampled token's.
    `echo` sends the prompt's text first, and with `top_logprobs` an entry for each of its tokens; the first entry is
    NaN. `deadline_ms` is relative to receipt; 0 means none. Lower `priority` runs first; at equal priority tenants take
    turns, and each tenant's requests run in order of arrival. A sequence of `BATCH_PRIORITY` is preempted by any other.
    `want_progress` requests `Progress` while the prompt is processed.
    """

    rid: int
    prompt: Prompt
    sampling: Sampling
    max_tokens: TokenCount | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: TopTokens | None = None
    echo: bool = False
    priority: int = 0
    deadline_ms: int = 0
    want_progress: bool = False
    trace: str = ""
    # Requests share cached prefixes only with others of the same salt.
    cache_salt: str = ""
    # Ids that an earlier worker sampled for this request. The client has their output, so generation continues after
    # them.
    resume: tuple[int, ...] = ()
    # Number of reasoning tokens after which the reasoning block is closed with the model's own markup; None means no
    # limit.
    thinking_budget: TokenCount | None = None
    constraint: Constraint | None = None
    # Digest of the API key's name, empty without a key. Tenants take turns at equal priority.
    tenant: str = ""
    # Maximum tokens of a draft; 0 means no drafts, None means the model's setting.
    most_drafted: DraftLength | None = None
    # Text that the client expects in much of the output.
    prediction: str = ""
    # Whether the output includes the stop string, or the text of the stop id, that ends it.
    includes_stop: bool = False
    # Name of the adapter; empty means the base model.
    adapter: str = ""
    # Share of the prompt's tokens that a sparse prefill keeps, 0 for the model's setting; None prefills all tokens.
    sparse_keep: SparseKeep | None = None
    # Truncation of a prompt that does not fit: 0 refuses it, -1 drops the oldest turns of a chat or the first tokens of
    # a text; a positive number keeps that many last tokens of a text, even if more would fit.
    truncate: int = 0
    # Numbers of turns and tokens that an earlier worker truncated and that must be truncated again; None if unknown.
    truncated: tuple[int, int] | None = None
    # Whether special tokens are part of the output's text.
    shows_special: bool = False
    # Whether `truncate` removes a chat's first tokens instead of its oldest turns.
    cuts_tokens: bool = False
    # Whether the ids of the prompt are sent before its answer.
    prompt_ids: bool = False
    # Number of top tokens sent, with log-probability and rank, for each token of the prompt before its answer; None
    # means that no prompt log-probabilities are sent.
    prompt_logprobs: TopTokens | None = None
    # Number of `prompt_logprobs` entries that the client already has from an earlier worker; only the others are sent.
    prompt_scored: int = 0
    # Number of `echo` entries with `top_logprobs` that the client has from an earlier worker, together with their text.
    echo_scored: int = 0
    # Questions about a chat, each asked alone in a last message. With questions, no text is generated, and the answer's
    # `data` has the log-probability of each label.
    questions: tuple[LabelledQuestion, ...] = ()


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Command to abort these sequences and calls. Each sequence still gets its terminal event.

    A repeated command is harmless.
    """

    rids: tuple[int, ...]
    reason: str = "client"


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Call to count the tokens of a prompt, and to send them if `want_ids`; or, if `want_text`, only to render a chat
    as text. Answered by `Tokenized` or `Rejected`.
    """

    rid: int
    prompt: Prompt
    want_ids: bool = False
    want_text: bool = False


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Call to decode ids to text. Answered by `Tokenized` or `Rejected`."""

    rid: int
    ids: tuple[int, ...]


class Explain(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Call to explain why tokens of the request `of` did not come from the prefix cache.

    The request is compared with `other`, or with the most similar earlier one if `other` is 0. Without `shows_text`
    texts are named by hashes, and without `crosses_salts` only requests of the same salt are compared. Answered by
    `Explained` or `Rejected`.
    """

    rid: int
    of: int
    other: int = 0
    shows_text: bool = False
    crosses_salts: bool = False


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
    """Command to use another grant of memory from now on.

    Memory above it is freed at once: free buffers, then cached prefixes, then running rows are preempted; no row is
    lost. `kv_part` and `cache_part` (0 to 1) leave a part of the grant's limits unused, under memory pressure.
    """

    memory_bytes: int
    kv_part: float = 1.0
    cache_part: float = 1.0


class SetLogLevel(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Command to log from this level on: `debug`, `info`, `warning`, `error` or `critical`."""

    level: str


class SetPace(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Command to leave a part of the GPU to a display. It affects no token.

    `duty_cycle` is the fraction of time in which the model computes. `tick_ms` limits the time of a tick with prefill,
    and `chunk` the prompt tokens per row in such a tick; 0 means no limit. An idle model is kept warm, if its
    specification says so, only with `may_keep_warm`.
    """

    duty_cycle: float = 1.0
    tick_ms: int = 0
    chunk: int = 0
    may_keep_warm: bool = True


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
    | Explain
)
