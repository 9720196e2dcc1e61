"""Verifier of one model: compares each way of running a request with the same request run alone."""

import math
import random
import tempfile
from collections.abc import Generator, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from msgspec.structs import replace

from protocol.prompts import TokensPrompt
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling
from protocol.verify import VerifyCheck
from worker.engine.load_checks.kv_check import without_codes
from worker.engine.rank_peers import RankPeers
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of
from worker.prompt.intake import Intake
from worker.prompt.sparse_limits import SparseLimits
from worker.speculation.drafter import Drafter, Proposer
from worker.tools.verify.comparison import compare, likelihoods
from worker.tools.verify.engine_session import EngineSession, VerifiedOutput
from worker.tools.verify.reference import Reference, perplexity
from worker.tools.verify.trial_drafters import EagerDrafts, NoisyDrafts
from worker.tools.verify.trial_requests import (
    CROWD,
    CROWD_OUTPUT,
    CROWD_PROMPT,
    SPARSE_OUTPUT,
    SPARSE_PROMPT,
    adapter_requests,
    crowd_requests,
    picture_requests,
    sparse_requests,
    text_requests,
)

# Number of words of the longest prompt. The others are parts of it; every other request begins with a shared text.
LONGEST_WORDS: Final = 160
SMALL_CHUNK: Final = 32
# Number of tokens requested per draft.
DRAFT_TOKENS: Final = 3
CACHE_BYTES: Final = 1 << 30
DISK_BYTES: Final = 4 << 30
CROWD_TOKENS: Final = 512
# Prompt tokens of the requests whose first token is timed, at most half of the context.
TIMED_TOKENS: Final = 512
# Largest ratio of a perplexity to mlx-lm's: kernels round by the shape of a pass, in 16 bits more than in 32. KV of 4
# bits changes a perplexity by as much as the model lets it, so it has no limit.
PERPLEXITY_RATIOS: Final = {"float32": 1.001, "other": 1.02, "kv_bits = 8": 1.03, "kv_bits = 4": math.inf}


class Verifier:
    """All checks of one model. The first check runs each request alone and without caches; all other checks must give
    the same outputs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: WorkerSpec,
        tokens: int,
        words: int = LONGEST_WORDS,
        rank_peers: RankPeers | None = None,
        reference: Reference | None = None,
    ) -> None:
        self._rank_peers = rank_peers
        self._reference = reference
        self._loaded = loaded
        self._intake = Intake(loaded, spec.parser, sparse=SparseLimits(spec.sparse_keep))
        # Caches are off, unless a check needs them.
        self._spec = replace(
            spec, cache_bytes=0, disk_cache_dir="", disk_cache_bytes=0, max_running=16, speculate="off"
        )
        self._requests = text_requests(tokens, words, loaded.max_context)
        # Requests for each adapter, greedy and sampled, with the texts of the first requests.
        self._adapted = adapter_requests(loaded, self._requests)
        self._requests += self._adapted
        # Requests with pictures; the first two have different pictures with the same text.
        self._pictured: list[Generate] = []
        if "image" in self._intake.modalities:
            self._pictured = picture_requests(len(self._requests) + 1, tokens)
            self._requests += self._pictured
        self._alone: list[VerifiedOutput] = []

    def checks(self) -> Generator[VerifyCheck]:
        requests, spec = self._requests, self._spec
        self._alone = self._session(spec).run([[request] for request in requests])
        if failed := next((output.failure for output in self._alone if output.failure is not None), None):
            yield VerifyCheck("alone", len(requests), note=failed.message)
            return
        yield self._compare("alone", self._alone)
        if self._reference is not None:
            yield self._perplexity(self._reference)
        if self._rank_peers is None:
            yield self._first_token()
        if self._spec.adapters:
            yield self._check_adapters()
        if self._pictured:
            yield self._check_pictures()
        yield self._compare("batched", self._session(spec).run([requests]))
        small = replace(spec, prefill_chunk=SMALL_CHUNK)
        yield self._compare(f"chunks of {SMALL_CHUNK}", self._session(small).run([requests]))
        yield from self._cached()
        yield self._preempted()
        yield self._resumed()
        if self._rank_peers is not None:
            return
        yield self._speculated()
        if self._loaded.proposer is not None:
            yield self._drafted(self._loaded.proposer)
        if spec.sparse_keep:
            yield self._sparse()
        if self._spec.kv_bits:
            yield self._dequantized()

    def _perplexity(self, reference: Reference) -> VerifyCheck:
        """Compare the perplexity of a paragraph, served by the engine, with that of mlx-lm's own forward pass."""
        if reference.perplexity is None:
            return VerifyCheck("perplexity", note=reference.reason, is_skipped=True)
        if not 1 < len(reference.ids) < self._loaded.max_context:
            return VerifyCheck("perplexity", note="the context is too short", is_skipped=True)
        request = Generate(1, TokensPrompt(reference.ids), Sampling(temperature=0.0), max_tokens=1, prompt_logprobs=0)
        output = self._session(self._spec).run([[request]])[0]
        if output.failure is not None:
            return VerifyCheck("perplexity", 1, note=output.failure.message)
        ours = perplexity(output.prompt_logprobs)
        ratio = max(ours / reference.perplexity, reference.perplexity / ours)
        kind = f"kv_bits = {self._spec.kv_bits}" if self._spec.kv_bits else "float32" if self._is_float32 else "other"
        return VerifyCheck(
            "perplexity",
            requests=1,
            tokens=len(reference.ids),
            measured=f"{ours:.3f}, {reference.perplexity:.3f} by {reference.source}",
            is_wrong=not ratio <= PERPLEXITY_RATIOS[kind],  # also if it is NaN
        )

    @property
    def _is_float32(self) -> bool:
        arrays: Any = tree_flatten(self._loaded.model.parameters())
        return all(array.dtype == mx.float32 for _, array in arrays)

    def _first_token(self) -> VerifyCheck:
        """Measure the time to the first token of a new prompt, and of the same prompt again."""
        rng = random.Random(2)
        count = min(TIMED_TOKENS, self._loaded.max_context // 2)
        first, timed = (tuple(rng.choices(range(self._loaded.vocab_size), k=count)) for _ in range(2))
        requests = [
            Generate(rid, TokensPrompt(ids), Sampling(temperature=0.0, ignore_eos=True), max_tokens=2)
            for rid, ids in enumerate((first, timed, timed), 1)  # the first one compiles kernels
        ]
        outputs = self._session(replace(self._spec, cache_bytes=CACHE_BYTES)).run([[each] for each in requests])
        if failed := next((output.failure for output in outputs if output.failure is not None), None):
            return VerifyCheck("first token", len(requests), note=failed.message)
        _, cold, warm = outputs
        return VerifyCheck(
            "first token",
            requests=len(requests),
            tokens=sum(len(output.ids) for output in outputs),
            cached=warm.cached,
            measured=f"{cold.first_token_s:.2f} s after {count} new tokens, {warm.first_token_s:.2f} s again",
        )

    def _check_adapters(self) -> VerifyCheck:
        """Check that each adapter is served, and changes the likelihoods of the base model."""
        adapters = adapters_of(self._loaded.model)
        infos = adapters.infos if adapters is not None else ()
        notes = [info.failure.message for info in infos if info.failure is not None]
        first = self._requests.index(self._adapted[0]) if self._adapted else 0
        outputs = self._alone[first : first + len(self._adapted)]
        base = likelihoods(self._alone[0])
        for request, output in zip(self._adapted, outputs, strict=True):
            if request.sampling == self._requests[0].sampling and likelihoods(output) == base:
                notes.append(f"the adapter {request.adapter!r} changes nothing")
        tokens = sum(len(output.ids) for output in outputs)
        return VerifyCheck("adapters", len(self._adapted), tokens, note="; ".join(notes))

    def _check_pictures(self) -> VerifyCheck:
        """Check that two pictures with the same text give different likelihoods."""
        first, second = self._alone[-len(self._pictured) :][:2]
        is_equal = likelihoods(first) == likelihoods(second)
        note = "another picture under the same text changes nothing" if is_equal else ""
        return VerifyCheck("two pictures", 2, len(first.ids) + len(second.ids), note=note)

    def _cached(self) -> Generator[VerifyCheck]:
        if not self._loaded.plan.reuses_prefixes:
            yield VerifyCheck("cache in memory", note=self._loaded.plan.reason, is_skipped=True)
            return
        warm = self._session(replace(self._spec, cache_bytes=CACHE_BYTES)).run([self._requests, self._requests])
        yield self._compare("cache in memory", warm, must_hit=True)
        if self._rank_peers is None:
            yield self._disk()

    def _disk(self) -> VerifyCheck:
        with tempfile.TemporaryDirectory(prefix="mlxd-verify-") as folder:
            # The requests are shorter than prefixes that a worker writes: here every prefix is written.
            spec = replace(
                self._spec,
                cache_bytes=CACHE_BYTES,
                disk_cache_dir=folder,
                disk_cache_bytes=DISK_BYTES,
                disk_cache_tokens=0,
            )
            self._session(spec).run([self._requests])
            return self._compare("cache on disk", self._session(spec).run([self._requests]), must_hit=True)

    def _preempted(self) -> VerifyCheck:
        if self._loaded.max_context < CROWD_PROMPT + CROWD_OUTPUT:
            return VerifyCheck("preempted", note="the context is too short", is_skipped=True)
        crowd = crowd_requests(self._loaded.vocab_size)
        alone = self._session(self._spec)
        expected = alone.run([[request] for request in crowd])
        limit = alone.kv_cost.bytes(CROWD, CROWD_TOKENS) + 1
        session = self._session(replace(self._spec, kv_bytes=limit))
        outputs = session.run([crowd])
        if not session.gauges.preemptions:
            # No row is preempted if memory does not grow with the length, or if all rows fit.
            return VerifyCheck("preempted", note="no row ever had to make room", is_skipped=True)
        return compare("preempted", outputs, expected)

    def _resumed(self) -> VerifyCheck:
        rng = random.Random(1)
        cuts = [rng.randrange(len(output.ids)) for output in self._alone]
        return self._compare("resumed", self._run_rest(self._requests, self._alone, cuts))

    def _run_rest(
        self, requests: Sequence[Generate], alone: Sequence[VerifiedOutput], cuts: Sequence[int]
    ) -> list[VerifiedOutput]:
        """Resume each request after its first `cuts[i]` tokens; return outputs that include these tokens."""
        resumed = [
            replace(request, resume=tuple(output.ids[:cut]))
            for request, output, cut in zip(requests, alone, cuts, strict=True)
        ]
        outputs = self._session(self._spec).run([resumed])
        for output, whole, cut in zip(outputs, alone, cuts, strict=True):
            output.ids = whole.ids[:cut] + output.ids
        return outputs

    def _speculated(self) -> VerifyCheck:
        """Check drafts that are partly right, so that rows accept different numbers of a block's tokens."""
        drafter = NoisyDrafts(self._loaded.vocab_size)
        for request, output in zip(self._requests, self._alone, strict=True):
            drafter.learn([*self._intake.row(request, 0.0).prompt, *output.ids])
        outputs = self._session(self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return VerifyCheck("speculated", note="drafts cannot be verified in this batch mode", is_skipped=True)
        return self._compare("speculated", outputs)

    def _drafted(self, proposer: Proposer) -> VerifyCheck:
        """Check the drafts of the worker's own head, drafter or draft model, at each step."""
        name = f"drafted by {proposer.source}"
        drafter = EagerDrafts(proposer, DRAFT_TOKENS)
        outputs = self._session(self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return VerifyCheck(name, note="it drafted nothing", is_skipped=True)
        return self._compare(name, outputs)

    def _dequantized(self) -> VerifyCheck:
        """Check quantized KV that is dequantized for each step, if steps normally read its codes: both must give equal
        outputs.
        """
        with without_codes(self._loaded.model) as is_other:
            if is_other:
                return self._compare("dequantized", self._session(self._spec).run([self._requests]))
        return VerifyCheck("dequantized", note="no step reads codes on this machine", is_skipped=True)

    def _sparse(self) -> VerifyCheck:
        """Compare sparse prompts that run together, or are resumed, with each prompt run alone."""
        if self._loaded.max_context < SPARSE_PROMPT + SPARSE_OUTPUT:
            return VerifyCheck("sparse prefill", note="the context is too short", is_skipped=True)
        requests = sparse_requests(self._loaded.vocab_size)
        alone = self._session(self._spec).run([[request] for request in requests])
        if failed := next((output.failure for output in alone if output.failure is not None), None):
            return VerifyCheck("sparse prefill", len(requests), note=failed.message)
        cuts = [3 * at for at in range(len(requests))]
        return compare("sparse prefill", self._run_rest(requests, alone, cuts), alone)

    def _session(self, spec: WorkerSpec, drafter: Drafter | None = None) -> EngineSession:
        return EngineSession(self._loaded, self._intake, spec, drafter, self._rank_peers)

    def _compare(self, name: str, outputs: Sequence[VerifiedOutput], *, must_hit: bool = False) -> VerifyCheck:
        check = compare(name, outputs, self._alone)
        if must_hit and not check.cached:
            return replace(check, note="nothing came from the cache")
        return check
