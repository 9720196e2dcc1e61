"""Pace of the step loop: the size of prefill chunks, rests between ticks, and the heartbeat that keeps the GPU warm.

Measured time of a forward pass, from which the pacer learns.

Prefill chunk size: the number of prompt tokens that a tick may process while streams are running.

Keep-warm heartbeat: forward passes of one token while the engine is idle.

After some two seconds without work, macOS takes the memory of the weights out of the GPU's page tables, and the next
request pays for its return (mlx#4609). Only a pass over the weights prevents that; a small operation does not.

Rest periods of a loop, which leave a part of the GPU's time to a desktop's display.

Pacer of the step loop: the size of a tick, the rests between ticks, and measured times from earlier starts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from protocol.spec import WorkerSpec
from protocol.timing_profile import PassKind, band_of
from protocol.to_worker import SetPace
from worker.engine.inbox import Command
from worker.engine.scheduling.timing_profile_file import KeptFile
from worker.kv.quantized import make_caches
from worker.model.pass_costs import PassCosts, width_of
from worker.speculation.drafters.target import capture_of


@dataclass(slots=True, frozen=True)
class PassTime:
    """Duration of a forward pass with `width` tokens of each of `rows` generating rows, and `prompted` prompt tokens.

    The rows together got `tokens` tokens from the pass. A pass with both rows and prompts is a fused pass, and
    `seconds` is its whole time. `is_reading` is set if the prompt tokens were read by a draft model.
    """

    seconds: float
    rows: int = 0
    width: int = 1
    tokens: int = 0
    prompted: int = 0
    is_reading: bool = False


# Chunk sizes are powers of two from this number of tokens on, so that few shapes are ever compiled.
MIN_CHUNK: Final = 8
# Chunk size beside running streams while no times are known.
FIRST_CHUNK: Final = 32
# A tick with prefill may last GENTLE_RATIO times as long as a tick without prefill if ENOUGH prompt tokens fit into
# that time, else STALL_RATIO times as long.
GENTLE_RATIO: Final = 1.4
ENOUGH: Final = 128
STALL_RATIO: Final = 2.2
# The permitted stall is proportional to the time of a step. The time of a verify block is multiplied by the block's
# gain, but at most by this number and by the number of waiting prompts, so that the time between two events of a stream
# stays bounded.
STALL_BLOCKS: Final = 2
# The permitted stall is multiplied by 1 + CROWD * (prompts in prefill - 1) / running streams.
CROWD: Final = 2
# A stall that is shorter than this is not noticeable, and is always allowed.
MIN_STALL_S: Final = 0.003
# A chunk of a prompt of at most this many tokens may stall streams for longer, because such a prompt does so only once
# or twice, and a full batch gains more than that costs. The last chunk of a long prompt may not, because the prompt has
# already slowed the streams for long.
SHORT_PROMPT: Final = 256
SHORT_PROMPT_FACTOR: Final = 2.5
# A tick of prefill without running streams takes about this long, so that commands are handled in between.
IDLE_TICK_S: Final = 0.5
# With several prompts, one of them long, a tick takes this long instead, so that short prompts do not wait long.
SHARED_TICK_S: Final = 0.1
# Chunks have passes of their own only if fused chunks have less than this part of their tokens per second.
_MARGIN: Final = 0.9
# If the smallest chunk exceeds the limit, a larger chunk that takes at most this many times as long is used, because
# fewer chunks are then needed.
_NO_DEARER: Final = 1.25
# Metal ends a process whose dispatch of attention runs for about five seconds. So tokens × context is at most this,
# except for chunks of at most WATCHDOG_LEAST tokens in all.
WATCHDOG: Final = 512 * 65_536
WATCHDOG_LEAST: Final = 64


@dataclass(slots=True)
class PaceLimits:
    """Limits of a tick on a desktop: its seconds, and its prompt tokens per row; 0 means no limit."""

    tick_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True, frozen=True)
class ChunkPlan:
    """Number of prompt tokens of each prefilling row in a tick, and whether they share one pass with the decode
    step."""

    tokens: int
    is_fused: bool = True


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    Decode is never starved: a tick has one decode step and at most one chunk per prefilling row. Prefill is never
    starved: the chunk has a minimum. A chunk shares the pass of the decode step, or has a pass of its own where that is
    faster.
    """

    def __init__(
        self,
        max_chunk: int,
        costs: PassCosts | None = None,
        *,
        own: PassKind = PassKind.ALONE,
        is_fixed: bool = False,
        has_watchdog: bool = False,
        can_fuse: bool = True,
        pass_tokens: int = 0,
        block_tokens: int = 1,
    ) -> None:
        """`costs` is the table of pass times, in which chunks with their own passes have the
        kind `own`.

        With `is_fixed` every chunk has `max_chunk` tokens, except at the end of a prompt, regardless of time. With
        `has_watchdog` a chunk is also bounded by its context, for Metal's watchdog. Without `can_fuse` chunks have
        forward passes of their own. A forward pass has at most `pass_tokens` tokens, if that is not 0; up to
        `block_tokens` of them belong to each row that generates.
        """
        self.pace = PaceLimits()
        # Whether half of a tick's time for prefill is reserved for a sparse prompt that a draft model reads.
        self.is_shared = False
        self.costs = costs or PassCosts()
        self._max = max_chunk
        self._own = own
        self._is_fixed = is_fixed
        self._has_watchdog = has_watchdog
        self._can_fuse = can_fuse
        self._pass_tokens = pass_tokens
        self._block_tokens = block_tokens

    def chunk(self, prefilling: int, decoding: int, longest: int = SHORT_PROMPT + 1, context: int = 0) -> ChunkPlan:
        """Return the plan of the next tick. `longest` is the length of the longest prompt, `context` the longest
        context of a row."""
        self.costs.band = band_of(context)
        plan = self._plan(prefilling, decoding, longest, self.most(prefilling, decoding, context))
        # No client waits for what a draft model reads.
        self.costs.prompted = 0 if self._own is PassKind.READING else plan.tokens * prefilling
        self.costs.prompt_kind = PassKind.FUSED if plan.is_fused else self._own
        return plan

    def _plan(self, prefilling: int, decoding: int, longest: int, most: int) -> ChunkPlan:
        if prefilling == 0 or self._is_fixed:
            return ChunkPlan(most)
        limit_s = self._limit_s(prefilling, decoding, longest)
        alone = self._fitting(self._own, prefilling, limit_s)
        if not decoding or not self._can_fuse:
            return ChunkPlan(min(most, alone or (FIRST_CHUNK if decoding else most)), is_fused=False)
        fused = self._gentle(prefilling, limit_s, longest)
        if not self.costs.is_fresh(decoding, self.costs.width):  # with a separate chunk, the step is measured
            return ChunkPlan(min(most, *([each for each in (fused, alone) if each] or [FIRST_CHUNK])), is_fused=False)
        if fused is None or alone is None:  # a fused chunk is assumed to be no slower
            return ChunkPlan(min(most, fused or alone or FIRST_CHUNK))
        fused_s = self.costs.chunk(PassKind.FUSED, fused * prefilling) or 0.0
        alone_s = self.costs.chunk(self._own, alone * prefilling) or 0.0
        if fused * alone_s >= _MARGIN * alone * fused_s:
            return ChunkPlan(min(most, fused))
        # A separate chunk is at most twice as large as a fused one: times of separate passes may come from prompts that
        # ran alone, with a shorter context.
        return ChunkPlan(min(most, alone, 2 * fused), is_fused=False)

    def selection_s(self, prefilling: int, decoding: int) -> float:
        """Return the seconds for the token selection of a sparse prefill in the next tick; `prefilling` counts the
        other prompts."""
        self.is_shared = prefilling > 0
        return self._limit_s(1 if decoding else prefilling + 1, decoding, SHORT_PROMPT + 1)

    def observe(self, each: PassTime) -> None:
        """Learn from a forward pass. The step and the chunk of a fused pass are separated by what is known of one."""
        if not each.rows:
            self.costs.observe_chunk(self._own, each.prompted, each.seconds)
            return
        step_s, chunk_s = each.seconds, 0.0
        if each.prompted and self.costs.has_step(each.rows, each.width):
            step_s, chunk_s = 0.0, each.seconds - self.costs.scaled_step(each.rows, width_of(each.width))
        elif each.prompted:
            # The small rest of a long pass says nothing about its step.
            known_s = self.costs.chunk(PassKind.FUSED, each.prompted) or each.seconds
            step_s = each.seconds - known_s if known_s < each.seconds / 2 else 0.0
        self.costs.observe_step(each.rows, each.width, step_s, each.tokens)
        if each.prompted:
            self.costs.observe_chunk(PassKind.FUSED, each.prompted, max(chunk_s, 0.0))

    def most(self, prefilling: int, decoding: int = 0, context: int = 0) -> int:
        """Return the largest permitted chunk, a power of two if the watchdog or the bound of a pass limits it."""
        most = self._max
        if self.pace.tokens and not self._is_fixed:
            most = min(most, self.pace.tokens)
        if self._has_watchdog and prefilling and context:
            tokens = max(WATCHDOG // context, WATCHDOG_LEAST) // prefilling
            most = min(most, max(MIN_CHUNK, _power(tokens)))
        if self._pass_tokens and prefilling:
            beside = decoding * self._block_tokens if self._can_fuse else 0
            most = min(most, _power((self._pass_tokens - beside) // prefilling))
        return most

    def _fitting(self, kind: PassKind, prefilling: int, limit_s: float) -> int | None:
        """Return the largest chunk that takes at most `limit_s` seconds; None if no chunk of this kind is known."""
        least_s = self.costs.chunk(kind, MIN_CHUNK * prefilling)
        if least_s is None:
            return None
        limit_s, size = max(limit_s, _NO_DEARER * least_s), MIN_CHUNK
        while size < self._max and self.costs.reaches(kind, 2 * size * prefilling):
            if (self.costs.chunk(kind, 2 * size * prefilling) or 0.0) > limit_s:
                break
            size *= 2
        return min(size, self._max)

    def _gentle(self, prefilling: int, limit_s: float, longest: int) -> int | None:
        """Return the largest fused chunk for a small stall if that is large enough, else for the whole stall."""
        gentle = self._fitting(PassKind.FUSED, prefilling, limit_s * (GENTLE_RATIO - 1) / (STALL_RATIO - 1))
        if gentle is None or gentle * prefilling >= ENOUGH or gentle >= longest:
            return gentle
        return self._fitting(PassKind.FUSED, prefilling, limit_s)

    def _limit_s(self, prefilling: int, decoding: int, longest: int) -> float:
        """Return the seconds that the chunks of a tick may take."""
        is_short = longest <= SHORT_PROMPT
        if decoding:
            limit_s = self._stall_s(prefilling, decoding) / (2 if self.is_shared else 1)
        else:
            limit_s = IDLE_TICK_S if prefilling == 1 or is_short else SHARED_TICK_S
        limit_s *= SHORT_PROMPT_FACTOR if is_short else 1.0
        return min(limit_s, self.pace.tick_s) if self.pace.tick_s else limit_s

    def _stall_s(self, prefilling: int, decoding: int) -> float:
        """Return the seconds that a chunk may add to the next step of rows that generate.

        The bound is per generated token, which may be delayed by one plain step. A block that gives four tokens may be
        delayed by four plain steps, even if the block takes only two.
        """
        width = self.costs.width
        step_s = self.costs.scaled_step(decoding, width)
        # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
        crowd = 1 + CROWD * (prefilling - 1) / decoding
        factor = min(self.costs.gain(decoding, width) or 1.0 if width > 1 else 1.0, prefilling, STALL_BLOCKS)
        return max((STALL_RATIO - 1) * step_s * factor * crowd, MIN_STALL_S)


def _power(tokens: int) -> int:
    """Return the largest power of two that is at most `tokens`, but at least 1."""
    return 1 << max(0, tokens.bit_length() - 1)


INTERVAL_S: Final = 1.5


class Heartbeat:
    """Beats until `keep_s` seconds after the engine's newest work; never if `keep_s` is 0. Owned by the engine thread.

    A beat leaves no trace: it has caches of its own, and is neither measured nor counted. A command that arrives during
    a beat waits for one forward pass.
    """

    def __init__(self, model: Any, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        # Whether the machine has mains power, as the gateway reports, and no memory pressure.
        self.has_power = True
        self.has_memory = True
        self.clock = clock
        self._model = model
        self._keep_s = keep_s
        self._used_at = float("-inf")
        self._beat_at = float("-inf")

    def receive(
        self,
        receive: Callable[[float | None], list[Command]],
        guard: Callable[[Callable[[], None]], None],
        *,
        is_idle: bool,
    ) -> list[Command]:
        """Return the next commands, and beat until there are any if the engine is idle.

        `receive` gets the seconds after which it returns without a command, or None; `guard` calls a beat, and recovers
        from its errors.
        """
        if not self._keep_s:
            return receive(None)
        if not is_idle:
            self._used_at = self.clock()
            return receive(None)
        while not (commands := receive(self._left_s())):
            guard(self._beat)
        return commands

    def _left_s(self) -> float | None:
        """Return the seconds until the next beat; None if there is none before the next command."""
        now, due = self.clock(), max(self._used_at, self._beat_at) + INTERVAL_S
        if not (self.has_power and self.has_memory) or max(now, due) > self._used_at + self._keep_s:
            return None
        return max(0.0, due - now)

    def _beat(self) -> None:
        if self.clock() <= self._used_at + self._keep_s:  # the machine may have slept meanwhile
            with mx.stream(generation_stream):
                mx.eval(self._model(mx.array([[0]]), cache=make_caches(self._model)))
            if (capture := capture_of(self._model)) is not None:
                capture.take_inputs()
        self._beat_at = self.clock()


# With a lower duty cycle, requests would hardly ever end.
MIN_DUTY_CYCLE: Final = 0.05
# A rest is at most this long, so that streams continue.
MAX_REST_S: Final = 2.0


class DutyCycle:
    """Duty cycle of a loop: after t seconds of work it rests for t · (1/ratio − 1). Owned by the loop's thread.

    Times are of the monotonic clock. Commands are handled during a rest, but do not shorten it.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self._until = 0.0
        # Seconds of all rests since the start.
        self.total_s = 0.0

    def set_ratio(self, ratio: float) -> None:
        """Set the fraction of the time that is for work."""
        self.ratio = min(1.0, max(MIN_DUTY_CYCLE, ratio))

    @property
    def is_on(self) -> bool:
        return self.ratio < 1.0

    def worked(self, began: float, ended: float) -> None:
        """Add the rest that this work requires to the rest that is left."""
        rest_s = min(MAX_REST_S, max(0.0, ended - began) * (1 / self.ratio - 1))
        self.total_s += rest_s
        self._until = min(max(self._until, ended) + rest_s, ended + MAX_REST_S)

    def left_s(self, now: float) -> float:
        """Return the seconds of rest that are left; 0 with a ratio of 1."""
        return max(0.0, self._until - now) if self.is_on else 0.0


class Pacer:
    """Decides how many prompt tokens a tick has, and when the tick runs; no output token depends on these decisions.

    `costs` is the table of pass times, which drafting also reads. `kept` is the file with times of earlier starts, if
    there is one. Owned by the engine thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        costs: PassCosts,
        kept: KeptFile | None,
        *,
        can_fuse: bool,
        has_watchdog: bool,
        pass_tokens: int = 0,
        block_tokens: int = 1,
    ) -> None:
        self.policy = ChunkPolicy(
            spec.prefill_chunk,
            costs,
            is_fixed=spec.deterministic,
            has_watchdog=has_watchdog,
            can_fuse=can_fuse,
            pass_tokens=pass_tokens,
            block_tokens=block_tokens,
        )
        # This policy sizes the slices that a draft model reads.
        self._reading = ChunkPolicy(
            spec.prefill_chunk,
            costs,
            own=PassKind.READING,
            has_watchdog=has_watchdog,
            can_fuse=False,
            pass_tokens=pass_tokens,
        )
        self.duty_cycle = DutyCycle()
        self._kept = kept

    def chunk(self, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        """Return the plan of the next tick; see `ChunkPolicy.chunk`."""
        return self.policy.chunk(prefilling, decoding, longest, context)

    def reads(self, decoding: int, unread: int, context: int) -> int:
        """Return how many of its `unread` tokens a draft model reads in the next tick."""
        return self._reading.chunk(1, decoding, unread, context).tokens

    def end_selection(self) -> None:
        """Note that no token selection runs any more, so that chunks get the whole tick again."""
        self.policy.is_shared = False

    def observe(self, each: PassTime) -> None:
        """Learn from a forward pass."""
        (self._reading if each.is_reading else self.policy).observe(each)

    def change(self, order: SetPace) -> None:
        """Change the limits of a tick and the duty cycle."""
        self.policy.pace = self._reading.pace = PaceLimits(order.tick_ms / 1000, order.chunk)
        self.duty_cycle.set_ratio(order.duty_cycle)

    def left_s(self) -> float:
        """Return the seconds of rest that are left."""
        return self.duty_cycle.left_s(time.monotonic()) if self.duty_cycle.is_on else 0.0

    def worked(self, began: float) -> None:
        """Add the rest for work that began at this time of the monotonic clock and has just ended."""
        self.duty_cycle.worked(began, time.monotonic())

    def flush_if_due(self) -> None:
        """Write learned times periodically; called by an idle loop."""
        if self._kept is not None:
            self._kept.flush_if_due(time.monotonic())

    def close(self) -> None:
        """Write learned times when the loop ends."""
        if self._kept is not None:
            self._kept.save()
