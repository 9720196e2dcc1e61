"""Usage of the keys as a simulated gateway recorded it, compared with what workers generated and clients received."""

from collections import Counter

from gateway.link.link import RID_BITS
from gateway.services import Services
from tests.simulation.simulated_worker import PROMPT_TOKENS
from tests.simulation.world import Violated, World

# Reservations are sums of fractions.
ROUNDING = 1e-6


class UsageBooks:
    """Ledger and meters of one life of the gateway. An earlier life's usage, which it has read, does not count."""

    def __init__(self, world: World, services: Services, boot: int) -> None:
        self._world = world
        self._services = services
        self._boot = boot
        self._began_at = world.loop.time()
        # Completion tokens that clients have received, by key.
        self.received: Counter[str] = Counter()
        self._ledger_before, self._meters_before = self._ledger(), self._meters()

    def _ledger(self) -> Counter[tuple[str, str, str]]:
        """Return the tokens and sequences in the ledger by key, model and kind."""
        ledger, sums = self._services.ledger, Counter[tuple[str, str, str]]()
        for month in (*ledger._past, ledger._month):  # pyright: ignore[reportPrivateUsage]
            for line in month.lines.values():
                sums[line.key, line.model, "requests"] += line.requests
                sums[line.key, line.model, "prompt"] += line.prompt
                sums[line.key, line.model, "completion"] += line.completion
        return sums

    def _meters(self) -> Counter[tuple[str, str]]:
        """Return the tokens of the meters by key and kind."""
        sums = Counter[tuple[str, str]]()
        for key, numbers in self._services.metrics.keys.items():
            sums[key, "prompt"] = numbers.prompt_tokens
            sums[key, "completion"] = numbers.generation_tokens
        return sums

    def check(self, local: set[str], rpm: dict[str, int]) -> None:
        """Check what was recorded once no request runs. `local` are the models whose tokens are those of workers alone;
        `rpm` has the limits of the keys all of whose sequences were requests to this life of the gateway.
        """
        ledger, meters = self._ledger(), self._meters()
        ledger.subtract(self._ledger_before)
        meters.subtract(self._meters_before)
        generated: Counter[tuple[str, str]] = Counter()
        sequences: Counter[tuple[str, str]] = Counter()
        for rid, work in self._world.work.items():
            if rid >> RID_BITS == self._boot:
                generated[work.key, work.model] += work.tokens
                sequences[work.key, work.model] += 1
        by_key: Counter[tuple[str, str]] = Counter()
        for (key, model, kind), count in ledger.items():
            by_key[key, kind] += count
            if model not in local:
                continue
            most = generated[key, model] if kind == "completion" else PROMPT_TOKENS * sequences[key, model]
            if kind != "requests" and count > most:
                raise Violated(f"{count} {kind} tokens of {model} are recorded to {key}, and workers had {most}")
        for (key, kind), count in meters.items():
            if count != by_key[key, kind]:
                raise Violated(f"the meter of {key} has {count} {kind} tokens, the ledger has {by_key[key, kind]}")
        if local:
            for key, count in self.received.items():
                if by_key[key, "completion"] < count:
                    raise Violated(f"{by_key[key, 'completion']} tokens are recorded to {key}, which got {count}")
        for key, limit in rpm.items():
            most = limit * (1 + (self._world.loop.time() - self._began_at) / 60)
            if limit and by_key[key, "requests"] > most:
                raise Violated(f"{by_key[key, 'requests']} sequences of {key} have run, its limit allows {most:.0f}")

    def held(self) -> dict[str, float]:
        """Return what the keys hold of their limits, and the memory that their bodies and media hold."""
        services = self._services
        left: dict[str, float] = {
            "bytes of keys' bodies": services.bodies._held.total(),  # pyright: ignore[reportPrivateUsage]
            "bytes of media": services.metrics.media_numbers.used_bytes,
        }
        for key, numbers in services.metrics.keys.items():
            left[f"requests of {key}"] = numbers.running
            left[f"sequences of {key}"] = numbers.sequences
        for key, meter in services.keyring.meters.items():
            left[f"bodies of {key}"] = meter._receiving  # pyright: ignore[reportPrivateUsage]
            left[f"sequences of batches of {key}"] = meter._batch_sequences  # pyright: ignore[reportPrivateUsage]
            reserved = meter._reserved  # pyright: ignore[reportPrivateUsage]
            left[f"reserved tokens of {key}"] = reserved if abs(reserved) > ROUNDING else 0.0
        return left
