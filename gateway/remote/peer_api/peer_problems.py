"""Validation of a peer's request. Other requests are checked against the same limits by the dialects' decoders."""

import math
from collections.abc import Iterator
from typing import Final

from gateway.api.common.canonical import STOP_CHARS_MAX, STOPS_MAX
from gateway.media.resolve import digest_of
from protocol.prompts import ChatPrompt, EmbedPrompt, Media, ScorePrompt, SpeechPrompt, TranscribePrompt
from protocol.to_worker import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN, Generate, Sampling

SEQUENCES_MAX: Final = 1024
TOP_LOGPROBS_MAX: Final = 20
RESUME_MAX: Final = 1 << 20
# Maximum characters of a prediction, of a schema and of a grammar.
TEXT_CHARS_MAX: Final = 4 << 20
# Maximum characters of all texts of one list, and maximum ids of one list.
WORDS_CHARS_MAX: Final = 16_384
IDS_MAX: Final = 16_384
ID_MAX: Final = (1 << 31) - 1


def problems(asked: list[Generate]) -> Iterator[str]:
    """Yield a description of each field that is outside the limits of the dialects."""
    if not 0 < len(asked) <= SEQUENCES_MAX:
        yield f"it has {len(asked)} sequences"
    if len({each.rid for each in asked}) != len(asked):
        yield "two sequences have one rid"
    for each in asked:
        yield from _problems_of(each)
    for medium in {id(medium): medium for medium in media_of(asked)}.values():
        # The digest must be right, because other clients share the features and prefixes that are cached under it.
        if digest_of(medium.data) != medium.digest:
            yield f"the digest of {medium.param} is not that of its bytes"


def _problems_of(request: Generate) -> Iterator[str]:
    if request.adapter:
        yield "adapters are served where they are loaded, and not for peers"
    if isinstance(request.prompt, EmbedPrompt | ScorePrompt | TranscribePrompt | SpeechPrompt):
        yield "peers are asked for text, not for vectors, scores or audio"
    if request.questions:
        yield "peers are asked for text, not for decisions"
    if len(request.stop) > STOPS_MAX or not all(0 < len(stop) <= STOP_CHARS_MAX for stop in request.stop):
        yield f"it has {len(request.stop)} stop strings, or one that is empty or too long"
    if (request.thinking_budget or 0) < 0 or (request.most_drafted or 0) < 0:
        yield "a budget is negative"
    if request.sparse_keep is not None and not 0 <= request.sparse_keep <= 1:
        yield f"its sparse prefill keeps {request.sparse_keep} of the prompt"
    if len(request.prediction) > TEXT_CHARS_MAX:
        yield "its prediction is too long"
    if request.constraint is not None and len(request.constraint.text) > TEXT_CHARS_MAX:
        yield "its constraint is too long"
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= TOP_LOGPROBS_MAX:
        yield f"top_logprobs is {request.top_logprobs}"
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= TOP_LOGPROBS_MAX:
        yield f"prompt_logprobs is {request.prompt_logprobs}"
    if not 0 <= request.prompt_scored <= ID_MAX:
        yield f"prompt_scored is {request.prompt_scored}"
    if not 0 <= request.echo_scored <= ID_MAX:
        yield f"echo_scored is {request.echo_scored}"
    if request.max_tokens is not None and request.max_tokens < 0:
        yield f"max_tokens is {request.max_tokens}"
    if request.deadline_ms < 0 or len(request.resume) > RESUME_MAX:
        yield "its deadline or what it resumes is out of range"
    if not -1 <= request.truncate <= ID_MAX or not all(0 <= each <= ID_MAX for each in request.left_out or ()):
        yield f"truncate is {request.truncate}, or a count of left-out tokens is out of range"
    yield from _problems_of_sampling(request.sampling)


def _problems_of_sampling(sampling: Sampling) -> Iterator[str]:
    for name, least, most in (
        ("temperature", 0.0, 2.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("typical_p", 0.0, 1.0),
        ("top_n_sigma", 0.0, math.inf),
        ("xtc_probability", 0.0, 1.0),
        ("xtc_threshold", 0.0, 1.0),
        ("dry_multiplier", 0.0, math.inf),
        ("dry_base", 1.0, math.inf),
    ):
        value: float = getattr(sampling, name)
        if not (math.isfinite(value) and least <= value <= most):
            yield f"{name} is {value}"
    for name in ("top_k", "penalty_window", "dry_allowed_length", "dry_window", "min_tokens"):
        if getattr(sampling, name) < 0:
            yield f"{name} is negative"
    biased = tuple(text for text, _ in sampling.bias_texts)
    if max(map(_chars, (sampling.bad_words, sampling.dry_breakers, biased))) > WORDS_CHARS_MAX:
        yield "texts that may not come, or end a repetition, are too long"
    ids = sampling.stop_ids, sampling.allowed_ids, sampling.logit_bias
    if max(map(len, ids)) > IDS_MAX or not all(0 <= each <= ID_MAX for some in ids for each in some):
        yield "it names too many ids of tokens, or one that is out of range"
    if not all(sampling.bad_words) or not all(sampling.dry_breakers):
        yield "a text that may not come, or ends a repetition, is empty"
    biases = [*sampling.logit_bias.values(), *(bias for _, bias in sampling.bias_texts)]
    if not all(biased) or not all(math.isfinite(bias) and abs(bias) <= 100 for bias in biases):
        yield "logit_bias is out of range"


def media_of(asked: list[Generate]) -> Iterator[Media]:
    """Yield the media of all sequences. Media that several choices share are repeated."""
    for each in asked:
        if isinstance(each.prompt, ChatPrompt):
            yield from each.prompt.media


def _chars(texts: tuple[str, ...]) -> int:
    return sum(map(len, texts))
