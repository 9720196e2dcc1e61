"""Choice of a client's model: the one that the owner wants, the default one, or the best that can do its work."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from gateway.ctl.model_verbs.offline import ServedModel, available_bytes
from gateway.failed import CommandFailed
from gateway.model_files.facts import FactsReader
from gateway.model_files.metadata import DEMOS, ModelMetadata, Unreadable, find, inspect
from protocol.kinds import TEXT

if TYPE_CHECKING:
    from gateway.client_setup.client_setups import Client

DEFAULT: Final = "default"
# Templates that show tools to the model read this variable.
_TOOLS: Final = "tools"


class Candidate(Struct, frozen=True):
    """A model on this machine for a client. `objections` are reasons against it, as sentences' ends after its name."""

    model: ServedModel
    info: ModelMetadata
    objections: tuple[str, ...]

    @property
    def is_default(self) -> bool:
        return DEFAULT in self.model.aliases


def named_or_default(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """Return the wanted model, or else the default one. Raises `CommandFailed`."""
    if wanted is not None:
        for model in models:
            if wanted in (model.name, *model.aliases):
                return model
        names = ", ".join(model.name for model in models)
        raise CommandFailed(f"there is no model {wanted!r}; models here: {names or 'none'}")
    if not models:
        raise CommandFailed("no model is configured or downloaded: mlxctl recommend lists some that fit")
    # The demo has the alias `default` if there is no configuration, even if other models are downloaded.
    real = [model for model in models if model.path not in DEMOS] or models
    return next((model for model in real if DEFAULT in model.aliases), real[0])


def candidates(models: Sequence[ServedModel], client: "Client", available: int) -> list[Candidate]:
    """List the models on this machine that generate text and are no demo, the best for a client first.

    `available` is the memory that one model may have. The owner's default model is the best, then the largest one;
    models with objections come last.
    """
    found: list[Candidate] = []
    for model in models:
        info = _info(model, available)
        if info is None or info.kind != TEXT or model.path in DEMOS:
            continue
        unfit = () if info.fits else (info.verdict,)
        found.append(Candidate(model, info, (*info.obstacles, *unfit, *_shortcomings(model, info, client))))
    return sorted(found, key=lambda each: (bool(each.objections), not each.is_default, -each.info.weights_bytes))


def shortcomings(model: ServedModel, client: "Client") -> list[str]:
    """List what a model lacks for a client, as far as its files show it."""
    info = _info(model, available_bytes())
    if info is not None:
        return _shortcomings(model, info, client)
    return _context_shortcoming(model.context, client)


def context_of(model: ServedModel) -> int:
    """Return the context length of the loaded or configured model, or else the one in its files; 0 if unknown."""
    if model.context:
        return model.context
    info = _info(model, available_bytes())
    return (info.context or 0) if info is not None else 0


def _shortcomings(model: ServedModel, info: ModelMetadata, client: "Client") -> list[str]:
    found: list[str] = []
    if model.path in DEMOS:
        found.append("is a small model to try mlxd with, which cannot do the work of an agent")
    if client.uses_tools and _TOOLS not in FactsReader().read(model.path).templates:
        found.append("cannot call tools: its chat template shows it none")
    found += _context_shortcoming(model.context or info.context or 0, client)
    if info.tokens_max is not None and info.tokens_max < client.context_min <= (info.context or 0):
        found.append(f"has memory for {info.tokens_max} tokens of context here; it needs {client.context_min}")
    return found


def _context_shortcoming(context: int, client: "Client") -> list[str]:
    if not context or context >= client.context_min:
        return []
    return [f"has a context of {context} tokens; the client needs {client.context_min}"]


def _info(model: ServedModel, available: int) -> ModelMetadata | None:
    try:
        return inspect(find(model.path), "auto", model.context, available)
    except Unreadable:
        return None
