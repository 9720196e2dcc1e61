"""Catalog of the models that all dialects list. Its facts come from configuration, workers and model files."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.access.caller import Caller
from gateway.config.names import ResolvedName
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.media.modalities import modalities
from gateway.model_files.metadata import FactsReader, ModelFacts
from gateway.request.opener import kind_of_model
from gateway.request.routing import Router
from gateway.services import Services
from gateway.workers.supervisor.state import State, WorkerView
from protocol.checkpoint import TEXT


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Entry of a list of models: a model, or a profile or adapter of a model.

    The worker reports `modalities` and `kind` (one of `protocol.checkpoint`); before the model is loaded, they come
    from its files.
    """

    model: ModelConfig
    profile: str
    view: WorkerView
    facts: ModelFacts
    sampling: SamplingDefaults
    modalities: tuple[str, ...]
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model.full_name}:{self.profile}" if self.profile else self.model.full_name

    @property
    def parent(self) -> str:
        """Name of the model to which this profile or adapter belongs; empty if this is a model."""
        return self.model.name if self.profile or self.model.adapter else ""

    def source(self, caller: Caller) -> str:
        """Path of the weights, if the caller is an operator or the path is a repository's name; otherwise the name of
        the model.
        """
        is_local = self.model.root.startswith((".", "/", "~"))
        return self.model.root if caller.is_admin or not is_local else self.parent or self.model.name

    @property
    def loaded_context(self) -> int | None:
        """Context length that the worker serves now; None if the model is not loaded."""
        ready = self.view.ready if self.view.state in (State.READY, State.DRAINING) else None
        return None if ready is None else ready.max_context

    @property
    def context(self) -> int | None:
        """Context length that the worker serves, or the configured one if the model is not loaded; None if neither is
        known.
        """
        return self.view.ready.max_context if self.view.ready is not None else self.model.context or None

    @property
    def longest_context(self) -> int | None:
        """Context length that the worker serves. Before the model is loaded, the maximum that configuration and files
        allow.
        """
        if self.view.ready is not None:
            return self.view.ready.max_context
        limits = [limit for limit in (self.model.context, self.facts.context) if limit]
        return min(limits, default=None)

    @property
    def kv_bits(self) -> int:
        """Bits per value of the KV cache; 0 if the cache is not quantized. Before the model is loaded, the configured
        number.
        """
        return self.view.ready.kv_bits if self.view.ready is not None else self.model.kv_bits or 0

    @property
    def chat_template(self) -> str:
        return self.model.chat_template or self.facts.chat_template

    @property
    def templates(self) -> str:
        """Text of all chat templates in use, which shows what they render."""
        return self.model.chat_template or self.facts.templates

    @property
    def knows_tools(self) -> bool:
        """Whether the model's chat template renders tools."""
        return "tools" in self.templates


class Catalog:
    """Models of the configuration and of upstreams that a caller may see."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.created_s = int(time.time())
        self._facts = FactsReader()

    async def list(self, caller: Caller) -> list[CatalogEntry]:
        """Return the models that `caller` may use: configured models in order, each with its profiles and adapters,
        then upstreams'.
        """
        services = self.services
        views = {view.name: view for view in services.pool.workers()}
        every = (each for model in services.config.models.values() for each in (model, *model.adapted))
        models = caller.usable(every)
        targets = [
            (ResolvedName(model, profile), views[model.name])
            for model in models
            for profile in ("", *(() if model.adapter else model.profiles))
        ]
        if caller.may_leave:
            known = {target.model.name for target, _ in targets}
            targets += [
                (ResolvedName(model), view)
                for model, view in self._upstream_models()
                if model.name not in known and caller.may_use(model)
            ]
        router = services.live.router

        def entries() -> list[CatalogEntry]:
            return [self._entry(router, target, view) for target, view in targets]

        return await asyncio.to_thread(entries)

    async def find(self, name: str, caller: Caller) -> CatalogEntry:
        """Return the entry for a name.

        Raises `ModelNotFound`; raises `BadRequest` if the name is missing and there is no default model.
        """
        router = self.services.live.router
        target = router.locate(name, caller)
        return await asyncio.to_thread(self._entry, router, target, self.services.view(target.model))

    def _upstream_models(self) -> Iterator[tuple[ModelConfig, WorkerView]]:
        """Yield the models of upstreams. A model that several upstreams have is yielded once."""
        names = {name for upstream in self.services.config.upstreams.values() for name in upstream.models}
        for name in sorted(names):
            yield ModelConfig(name=name, path=""), WorkerView(name=name, path="", state=State.READY)

    def _entry(self, router: Router, target: ResolvedName, view: WorkerView) -> CatalogEntry:
        model = target.model
        return CatalogEntry(
            model,
            target.profile,
            view,
            self._facts.read(model.path),
            router.filled(target).sampling,
            modalities(model.path, view.ready),
            kind_of_model(model, view.ready) or TEXT,
        )
