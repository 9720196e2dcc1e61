"""Intake of embedding requests, and the loop that computes them.

Intake of embedding requests: formats, encodes and validates each prompt and makes a job of it, off the loop's
thread.

MLX checks no bounds, so every token id that could reach it is checked here.

Loop of an embedding model: it takes jobs, runs one forward pass after another, and sends one answer for each job.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from msgspec.structs import replace

from protocol.checkpoint import EMBED
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Progress, Tokenized, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import (
    ChatPrompt,
    Detokenize,
    EmbedPrompt,
    Generate,
    NextTurnPrompt,
    Prompt,
    ScorePrompt,
    SpeechPrompt,
    TextPrompt,
    Tokenize,
    TokensPrompt,
    TranscribePrompt,
)
from worker.embedding.load_model import EmbeddingInput, EmbeddingJob, EmbeddingModel, Numbers
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.model import memory
from worker.prompt.encode import MAX_CHARS_PER_TOKEN
from worker.prompt.limits_and_truncation import check_countable, check_ids
from worker.turn_loop import TurnLoop

log = logging.getLogger("mlxd.worker")

# Maximum size of an answer, which must fit into one frame.
_MAX_ANSWER_BYTES: Final = 48 << 20
_DEFAULT_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
# Texts before and after each pair in the training of Qwen3-Reranker.
_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Preparer:
    """Converter of requests to jobs, for one loaded model."""

    def __init__(self, model: EmbeddingModel) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        # The lock is needed because truncation is set on the tokenizer itself, which two threads use.
        self._lock = threading.RLock()

    def job(self, request: Generate, arrived: float) -> EmbeddingJob:
        """Return a validated job. Raises `RequestInvalid`."""
        prompt = request.prompt
        match prompt:
            case EmbedPrompt() if self._model.kind == EMBED:
                items, dimensions = self._embed_items(prompt), self._dimensions(prompt)
            case ScorePrompt() if self._model.kind != EMBED:
                items, dimensions = self._pair_items(prompt), 0
            case _:
                raise self._wrong_kind()
        return EmbeddingJob(
            rid=request.rid,
            items=items,
            arrived=arrived,
            dimensions=dimensions,
            priority=request.priority,
            tenant=request.tenant,
            deadline=arrived + request.deadline_ms / 1e3 if request.deadline_ms else None,
            wants_progress=request.want_progress,
        )

    def tokenize(self, request: Tokenize | Detokenize, is_wanted: Callable[[], bool]) -> Tokenized | None:
        """Count or decode tokens. Raises `RequestInvalid`."""
        match request:
            case Detokenize(rid, ids):
                check_ids(ids, "tokens", self._model.vocab_size)
                with self._lock:
                    return Tokenized(rid, len(ids), text=self._tokenizer.decode(ids))
            case Tokenize(rid, prompt, want_ids):
                ids = self._counted_ids(prompt)
                return Tokenized(rid, len(ids), tuple(ids) if want_ids else ())

    def _counted_ids(self, prompt: Prompt) -> Sequence[int]:
        match prompt:
            case TokensPrompt(ids):
                check_ids(ids, "prompt", self._model.vocab_size)
                return ids
            case TextPrompt(text, adds_special=adds_special):
                check_countable(text, "prompt", self._model.max_context)
                if adds_special:
                    return self._encode([text], 0)[0].ids
                with self._lock:
                    return self._ids(text)
            case ChatPrompt() | NextTurnPrompt() | EmbedPrompt() | ScorePrompt() | TranscribePrompt() | SpeechPrompt():
                raise self._wrong_kind()

    # -- embeddings --------------------------------------------------------------------------------------------------

    def _embed_items(self, prompt: EmbedPrompt) -> list[EmbeddingInput]:
        steps = self._model.steps
        assert steps is not None
        before = steps.prompt(prompt.prompt_name, prompt.is_query, prompt.is_document)
        if before is None:
            known = ", ".join(sorted(steps.prompts)) or "none"
            message = f"The model has no prompt named {prompt.prompt_name[:100]!r}; it has: {known}."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="prompt_name")
        most = self._most(prompt.truncate)
        texts = [before + each for each in prompt.inputs if isinstance(each, str)]
        texts = [text.lower() for text in texts] if steps.is_lowercased else texts
        encoded = iter(self._encode(texts, most))
        items: list[EmbeddingInput] = []
        for at, given in enumerate(prompt.inputs):
            if isinstance(given, str):
                items.append(next(encoded))
                continue
            check_ids(given, f"input[{at}]", self._model.vocab_size)
            items.append(EmbeddingInput(given[:most] if most else given))
        self._check_items(items, "input")
        return items

    def _dimensions(self, prompt: EmbedPrompt) -> int:
        """Return how many dimensions of each vector are sent; 0 means all. Raises `RequestInvalid`."""
        info, steps = self._model.embedding, self._model.steps
        assert info is not None
        assert steps is not None
        wanted = prompt.dimensions or steps.dimensions
        if wanted > info.dimensions:
            message = f"'dimensions' is {wanted}; the vectors of this model have {info.dimensions}."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="dimensions")
        if prompt.dimensions not in (0, info.dimensions) and not info.is_matryoshka:
            message = (
                "The files of this model do not declare that its vectors may be cut: 'dimensions' is not supported "
                "(operator: matryoshka = true where the model was trained for it)."
            )
            raise RequestInvalid(Code.UNSUPPORTED, message, param="dimensions")
        size = len(prompt.inputs) * (wanted or info.dimensions) * 4
        if size > _MAX_ANSWER_BYTES:
            message = f"The vectors of {len(prompt.inputs)} inputs would take {size} bytes; ask for fewer at once."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="input")
        return 0 if wanted == info.dimensions else wanted

    # -- pairs -------------------------------------------------------------------------------------------------------

    def _pair_items(self, prompt: ScorePrompt) -> list[EmbeddingInput]:
        if len(prompt.queries) not in (1, len(prompt.documents)):
            message = f"{len(prompt.queries)} texts cannot be paired with {len(prompt.documents)}."
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=prompt.params[0])
        queries = prompt.queries * len(prompt.documents) if len(prompt.queries) == 1 else prompt.queries
        if prompt.instruction and not self._model.is_judge:
            message = "This model takes no instruction: it was trained on pairs alone."
            raise RequestInvalid(Code.UNSUPPORTED, message, param="instruction")
        make = self._judged if self._model.is_judge else self._paired
        with self._lock:
            items = [make(query, document, prompt) for query, document in zip(queries, prompt.documents, strict=True)]
        self._check_items(items, prompt.params[1])
        return items

    def _paired(self, query: str, document: str, prompt: ScorePrompt) -> EmbeddingInput:
        """Encode a pair with the tokenizer's own method for two texts."""
        most = self._most(prompt.truncate)
        encoded = self._tokenizer(
            self._bounded(query),
            self._cut_document(document, prompt),
            truncation="only_second" if most else False,
            max_length=most or None,
            return_token_type_ids=self._model.has_segments,
            verbose=False,
        )
        types = encoded["token_type_ids"] if self._model.has_segments else ()
        return EmbeddingInput(tuple(encoded["input_ids"]), tuple(types))

    def _judged(self, query: str, document: str, prompt: ScorePrompt) -> EmbeddingInput:
        """Format a pair as a chat that the model answers with yes or no."""
        question = (
            f"<Instruct>: {prompt.instruction or _DEFAULT_INSTRUCTION}\n<Query>: {self._bounded(query)}\n<Document>: "
        )
        before, after = self._ids(_BEFORE), self._ids(_AFTER)
        # Query and document are encoded as one text, as in training: tokens may cross their boundary.
        body = self._ids(question + self._cut_document(document, prompt))
        if most := self._most(prompt.truncate):
            room = most - len(before) - len(after)
            # A query that does not fit is not truncated, so that the request is refused.
            body = body[:room] if room >= len(self._ids(question)) else body
        return EmbeddingInput((*before, *body, *after))

    def _cut_document(self, document: str, prompt: ScorePrompt) -> str:
        document = self._bounded(document)
        most = prompt.truncate_document
        if not most:
            return document
        ids = self._ids(document)
        return document if len(ids) <= most else self._tokenizer.decode(ids[:most], skip_special_tokens=False)

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    # -- both --------------------------------------------------------------------------------------------------------

    def _most(self, truncate: int) -> int:
        """Return the number of tokens to which an input is truncated; 0 means that it is not truncated."""
        longest = self._model.max_context
        return longest if truncate < 0 else min(truncate, longest)

    def _bounded(self, text: str) -> str:
        """Return only the beginning of a text that is too long: encoding all of it could take seconds."""
        start = text[: MAX_CHARS_PER_TOKEN * (self._model.max_context + 1)]
        is_whole = len(start) == len(text) or len(self._ids(start)) <= self._model.max_context
        return text if is_whole else start

    def _encode(self, texts: list[str], most: int) -> list[EmbeddingInput]:
        if not texts:
            return []
        with self._lock:
            encoded = self._tokenizer(
                [self._bounded(text) for text in texts],
                truncation=most > 0,
                max_length=most or None,
                return_token_type_ids=False,
                verbose=False,
            )
        return [EmbeddingInput(tuple(ids)) for ids in encoded["input_ids"]]

    def _check_items(self, items: Sequence[EmbeddingInput], param: str) -> None:
        longest = self._model.max_context
        for at, item in enumerate(items):
            where = f"{param}[{at}]"
            if not item.ids:
                raise RequestInvalid(Code.INVALID_REQUEST, f"'{where}' has no tokens.", param=where)
            if len(item.ids) > longest:
                raise RequestInvalid(
                    Code.CONTEXT_LENGTH_EXCEEDED,
                    f"This model's maximum input length is {longest} tokens. However, '{where}' has at least "
                    f"{len(item.ids)} tokens. Please shorten it, or set 'truncate_prompt_tokens' to -1.",
                    param=where,
                    numbers=(len(item.ids), longest),
                )
            check_ids(item.ids, where, self._model.vocab_size)

    def _wrong_kind(self) -> RequestInvalid:
        is_embedder = self._model.kind == EMBED
        what = "makes embeddings" if is_embedder else "scores pairs of texts"
        where = "POST /v1/embeddings" if is_embedder else "POST /v1/rerank or /v1/score"
        return RequestInvalid(Code.UNSUPPORTED, f"This model {what} and nothing else: use {where}.", param="model")


# Maximum tokens of one forward pass, with padding. A higher limit gains nothing on a CPU, and an abort waits for the
# pass.
_GPU_PASS_TOKENS: Final = 16_384
CPU_PASS_TOKENS: Final = 2_048
_MIN_PASS_TOKENS: Final = 256
# A failed allocation halves the tokens of a pass; they double again after each interval of this length.
_REGROW_INTERVAL_S: Final = 300.0
_WARM_UP_TOKENS: Final = 16
# Maximum padding of a row in a pass, as a fraction of the longest row.
_MAX_PADDING_FRACTION: Final = 0.12
_NOT_FINITE: Final = Failure(
    Code.ROW_FAILED, "the model gave no number for one of the inputs: its vector is not finite, or null"
)


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Place of a result: its job, and the index of its item."""

    job: EmbeddingJob
    at: int

    @property
    def item(self) -> EmbeddingInput:
        return self.job.items[self.at]


class JobLoop(TurnLoop[EmbeddingJob]):
    """Loop of jobs for one loaded model."""

    def __init__(self, model: EmbeddingModel, spec: WorkerSpec, send: Callable[[Up], None], gauges: Gauges) -> None:
        super().__init__(spec, model.weights_bytes, send, gauges)
        self._model = model
        self._most_tokens = _GPU_PASS_TOKENS if memory.has_gpu() else CPU_PASS_TOKENS
        self._tokens = self._most_tokens
        self._relaxes_at = 0.0

    def _compute_once(self) -> None:
        item = EmbeddingInput(
            tuple(at % self._model.vocab_size for at in range(min(_WARM_UP_TOKENS, self._model.max_context)))
        )
        self._model.compute([item])

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Run one forward pass for the job whose turn it is, with items of similar length from other jobs."""
        now = time.monotonic()
        if self._tokens < self._most_tokens and now >= self._relaxes_at:
            self._tokens, self._relaxes_at = self._tokens * 2, now + _REGROW_INTERVAL_S
        group = take_group(self._in_turn(), self._tokens)
        for place in group:
            place.job.admitted = place.job.admitted or now
        running = len({place.job.rid for place in group})
        self._gauges.running, self._gauges.waiting = running, len(self._requests) - running
        self._compute(group)
        self._gauges.step_seq += 1

    def _compute(self, group: Sequence[ResultPlace]) -> None:
        try:
            rows = self._model.compute([place.item for place in group])
        except Exception as error:  # code of any architecture may raise any exception
            self._recover(group, error)
        else:
            self._store(group, rows)

    def _store(self, group: Sequence[ResultPlace], rows: Numbers) -> None:
        sound = [bool(np.isfinite(row).all()) for row in rows]
        if self._model.embedding is not None:
            sound = [is_sound and bool(row.any()) for is_sound, row in zip(sound, rows, strict=True)]
        tokens = 0
        for place, row, is_sound in zip(group, rows, sound, strict=True):
            if place.job.rid not in self._requests:
                continue
            if not is_sound and len(group) > 1:
                # The item is computed again alone, so that the other items cannot be the cause.
                self._compute([place])
                continue
            if not is_sound:
                log.error("request %d: input %d has no finite vector", place.job.rid, place.at)
                self._fail(place.job, _NOT_FINITE)
                continue
            place.job.store(place.at, row)
            tokens += len(place.item.ids)
        self._gauges.prompt_tokens += tokens
        for job in {place.job.rid: place.job for place in group}.values():
            if job.rid not in self._requests:
                continue
            if job.wants_progress:
                self._outbox.send(Progress(job.rid, job.computed_tokens, job.tokens))
            if job.is_computed:
                self._finish(job, Finish.STOP)

    def _recover(self, group: Sequence[ResultPlace], error: Exception) -> None:
        """Compute the group again in smaller parts. If a group of one item fails, the job of that item ends."""
        if self._survive(error):
            self._tokens = max(_MIN_PASS_TOKENS, self._tokens // 2)
            self._relaxes_at = time.monotonic() + _REGROW_INTERVAL_S
        log.warning("a pass of %d inputs failed: %s", len(group), error)
        if len(group) > 1:
            middle = len(group) // 2
            self._compute(group[:middle])
            self._compute(group[middle:])
            return
        self._fail(
            group[0].job, Failure(Code.ROW_FAILED, "the request failed while an input was computed", repr(error))
        )

    def _ending(self, job: EmbeddingJob, finish: Finish, failure: Failure | None) -> Delta:
        return replace(super()._ending(job, finish, failure), data=job.data() if finish is Finish.STOP else b"")


def take_group(jobs: Sequence[EmbeddingJob], tokens: int) -> list[ResultPlace]:
    """Take the longest item of the first job, and items of all jobs, in job order, that are nearly as long.

    A group has up to `tokens` tokens including padding, and at least one item.
    """
    longest = len(jobs[0].items[jobs[0].left[0]].ids)
    room = max(1, tokens // longest)
    group: list[ResultPlace] = []
    for job in jobs:
        chosen = list(islice(_fitting(job, longest), room - len(group)))
        group += [ResultPlace(job, at) for at in chosen]
        taken = set(chosen)
        job.left = [at for at in job.left if at not in taken]
        if len(group) >= room:
            break
    return group


def _fitting(job: EmbeddingJob, longest: int) -> Iterator[int]:
    least = longest * (1 - _MAX_PADDING_FRACTION)
    return (at for at in job.left if least <= len(job.items[at].ids) <= longest)
