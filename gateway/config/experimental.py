"""Experimental features: what has never run on what it exists for, and why. Each is off until a setting asks for it,
except the duty cycle, which `desktop = "auto"` uses on a Mac.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.config.settings import CAN_SEE_DESKTOP, ModelConfig, ServerConfig
from gateway.model_files.metadata import Unreadable, find, read_config
from protocol.group import JACCL


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experimental feature. `page` is the page of the documentation that describes it."""

    name: str
    reason: str
    page: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason} (docs/{self.page})"


EAGLE: Final = Experiment("EAGLE-3", "never run with a published head", "speculation.md")
BLOCK: Final = Experiment("DFlash", "like DFlash 2 and DSpark never run with a published drafter", "speculation.md")
ASSISTANT: Final = Experiment("Gemma 4 assistant", "never run with a published drafter", "speculation.md")
SPARSE: Final = Experiment(
    "sparse prefill", "run with real weights of one small model only, which lost the facts asked for", "speculation.md"
)
JACCL_GROUP: Final = Experiment("JACCL", "never run over Thunderbolt", "groups.md")
EXPERTS: Final = Experiment("experts on disk", "never run on a Mac", "experts.md")
KV_EVENTS: Final = Experiment("kv_events", "never run with a real router", "fleet.md")
DUTY_CYCLE: Final = Experiment("duty cycle", "never run on a Mac", "configuration.md")
EXPERIMENTS: Final = (EAGLE, BLOCK, ASSISTANT, SPARSE, JACCL_GROUP, EXPERTS, KV_EVENTS, DUTY_CYCLE)
# Parts of a drafter's type, by which its worker knows the drafter too.
SIGNS: Final[Mapping[tuple[str, ...], Experiment]] = {
    ("eagle3",): EAGLE,
    ("dflash", "dspark", "muse_glimmer_assistant"): BLOCK,
    ("gemma4_assistant", "gemma4_unified_assistant"): ASSISTANT,
}


def experiments_of(server: ServerConfig, model: ModelConfig) -> list[Experiment]:
    """Return the experimental features that a model is configured to use. Reads the draft model's `config.json`."""
    return list(_experiments_of(server, model))


def _experiments_of(server: ServerConfig, model: ModelConfig) -> Iterator[Experiment]:
    if model.draft and (drafter := _drafter(model.draft)) is not None:
        yield drafter
    if model.sparse_prefill:
        yield SPARSE
    if model.group.backend == JACCL:
        yield JACCL_GROUP
    if model.experts == "disk":
        yield EXPERTS
    if model.kv_events:
        yield KV_EVENTS
    if server.desktop is True or (server.desktop == "auto" and CAN_SEE_DESKTOP):
        yield DUTY_CYCLE


def _drafter(path: str) -> Experiment | None:
    """Return the kind of an experimental drafter; None for other drafters, and if its files are not here."""
    try:
        config = read_config(find(path))
    except (Unreadable, OSError):
        return None
    names = _types(config)
    return next((each for signs, each in SIGNS.items() if any(sign in name for sign in signs for name in names)), None)


def _types(config: Mapping[str, Any]) -> list[str]:
    names = [config.get("speculators_model_type") or config.get("model_type", ""), *(config.get("architectures") or ())]
    return [str(name).lower() for name in names] + (["dflash"] if "dflash_config" in config else [])
