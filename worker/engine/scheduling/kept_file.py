"""File of the timing profile that a worker keeps for its next start."""

import logging
import time
from pathlib import Path
from typing import Final

from msgspec import structs

from protocol.model_digest import digest
from protocol.spec import WorkerSpec
from protocol.timing_profile import (
    FORMAT,
    Calibration,
    LoadFacts,
    TimingProfile,
    UnusableProfile,
    file_of,
    read,
    write,
)
from worker.model.device import machine
from worker.model.pass_costs import PassCosts

log = logging.getLogger("mlxd.worker")

# The file is written only if at least this many new passes were measured.
MIN_NEW_PASSES: Final = 20
WRITE_INTERVAL_S: Final = 600.0


def open_kept(folder: str, form: str, spec: WorkerSpec) -> "KeptFile":
    """Open the file for the specification's model, for this form of its weights and KV, and for this machine."""
    here = machine()
    key = digest(FORMAT, form, spec.name, here, spec.experts, spec.expert_cache_bytes)
    return KeptFile(Path(folder), key, spec.name, spec.path, here)


class KeptFile:
    """Times of a model under one key, and their file. Owned by the loop's thread.

    If the file is bad, a line is logged and the file's times are lost; nothing else fails.
    """

    def __init__(self, folder: Path, key: str, model: str, path: str, machine: str) -> None:
        self._folder = folder
        self._empty = TimingProfile(format=FORMAT, key=key, model=model, path=path, machine=machine, written=0.0)
        self._due = 0.0
        # Number of measured passes whose times were written to the file.
        self._written = 0
        self._is_writable = True
        self._has_warned = False
        self.kept = self._read()
        self.costs = PassCosts(self.kept.passes if self.kept is not None else ())
        self._load = self.kept.load if self.kept is not None else None

    @property
    def calibration(self) -> Calibration | None:
        return self.kept.calibration if self.kept is not None else None

    def write_load(self, load: LoadFacts) -> None:
        """Write the facts of a load."""
        self._load = load
        before = self._read() or self._empty
        self._write(structs.replace(before, load=load, written=time.time()))

    def tend(self, now: float) -> None:
        """Write new times, at most once per `WRITE_INTERVAL_S`; `now` is a time of the monotonic clock."""
        if now >= self._due and self._has_news:
            self.save()
            self._due = now + WRITE_INTERVAL_S

    def save(self) -> None:
        """Write new times. A calibration that was written in the meantime stays."""
        if not self._has_news:
            return
        self._written = self.costs.passes
        self._write(
            structs.replace(
                self._read() or self._empty,
                load=self._load,
                passes=tuple(self.costs.records()),
                written=time.time(),
            )
        )

    def write_calibration(self, calibration: Calibration) -> None:
        """Write the results of a calibration, with its times. Raises `OSError`."""
        before = self._read() or self._empty
        write(
            self._folder,
            structs.replace(
                before,
                load=self._load or before.load,
                passes=tuple(self.costs.records()),
                written=time.time(),
                calibration=calibration,
            ),
        )

    @property
    def _has_news(self) -> bool:
        return self.costs.passes - self._written >= MIN_NEW_PASSES

    def _read(self) -> TimingProfile | None:
        file = file_of(self._folder, self._empty.model, self._empty.key)
        try:
            profile = read(file)
            if (profile.key, profile.model) != (self._empty.key, self._empty.model):
                raise UnusableProfile("it is of another model, machine or version")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnusableProfile as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s is not used: %s", file, error)
            return None
        return profile

    def _write(self, profile: TimingProfile) -> None:
        if not self._is_writable:
            return
        try:
            write(self._folder, profile)
        except OSError as error:
            self._is_writable = False
            log.warning("measured times are not kept in %s: %s", self._folder, error)
