"""Catalog of configured models: each with its worker's state and the facts of its files, for lists of all forms."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.access.caller import Caller
from gateway.config.names import ResolvedName
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.media.modalities import modalities
from gateway.model_files.facts import FactsReader, ModelFacts
from gateway.request.model_kind import kind_of_model
from gateway.request.routing import Router
from gateway.services import Services
from gateway.workers.supervisor.state import State, WorkerView
from protocol.kinds import TEXT


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name of a list: a model, or a profile or an adapter of it."""

    found: ResolvedName
    view: WorkerView
    facts: ModelFacts
    # Of requests that are silent.
    sampling: SamplingDefaults
    # As its worker says, or before a load as its files promise.
    modalities: tuple[str, ...]
    # One of `protocol.kinds`: as its worker or its settings say, or its files.
    kind: str

    @property
    def name(self) -> str:
        name, profile = self.found.model.full_name, self.found.profile
        return f"{name}:{profile}" if profile else name

    @property
    def parent(self) -> str:
        """The model of which it is a profile or an adapter; empty for a model."""
        return self.found.model.name if self.found.profile or self.found.model.adapter else ""

    @property
    def root(self) -> str:
        """Path of its weights: of the model, or of the adapter."""
        return self.found.model.root

    def source(self, caller: Caller) -> str:
        """Path of its weights, where the caller is an operator or it is a repository's; otherwise a name."""
        is_local = self.root.startswith((".", "/", "~"))
        return self.root if caller.is_admin or not is_local else self.parent or self.found.model.name

    @property
    def is_loaded(self) -> bool:
        """Whether its worker serves it now: what it once said stays known."""
        return self.view.ready is not None and self.view.state in (State.READY, State.DRAINING)

    @property
    def context(self) -> int | None:
        """Context that is served: of the worker, or before a load as configured; None while neither says."""
        return self.view.ready.max_context if self.view.ready is not None else self.found.model.context or None

    @property
    def longest_context(self) -> int | None:
        """Context that is served, or before a load the longest that its configuration and its files allow."""
        if self.view.ready is not None:
            return self.view.ready.max_context
        limits = [limit for limit in (self.found.model.context, self.facts.context) if limit]
        return min(limits, default=None)

    @property
    def kv_bits(self) -> int:
        """Bits of a number of its KV: of its worker, or before a load as configured; 0 where it is not quantized."""
        return self.view.ready.kv_bits if self.view.ready is not None else self.found.model.kv_bits or 0

    @property
    def chat_template(self) -> str:
        return self.found.model.chat_template or self.facts.chat_template

    @property
    def knows_tools(self) -> bool:
        """Whether its chat template shows tools."""
        return "tools" in self.chat_template


class Catalog:
    """The models of the configuration in force and of its peers, as a caller may see them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._facts = FactsReader()

    async def list(self, caller: Caller) -> list[CatalogEntry]:
        """Models that `caller` may use, each with its profiles and adapters, in the configuration's order; then those
        of peers."""
        views = {view.name: view for view in self._services.pool.workers()}
        every = (each for model in self._services.config.models.values() for each in (model, *model.adapted))
        models = caller.usable(every)
        targets = [
            (ResolvedName(model, profile), views[model.name])
            for model in models
            for profile in ("", *(() if model.adapter else model.profiles))
        ]
        targets += [
            (ResolvedName(model), view) for model, view in self._services.fleet.models() if caller.may_use(model)
        ]
        if caller.may_leave:
            known = {target.model.name for target, _ in targets}
            targets += [(ResolvedName(model), view) for model, view in self._leaving() if model.name not in known]
            targets = [each for each in targets if caller.may_use(each[0].model)]
        router = self._services.router

        def entries() -> list[CatalogEntry]:
            return [self._entry(router, target, view) for target, view in targets]

        return await asyncio.to_thread(entries)

    async def find(self, name: str, caller: Caller) -> CatalogEntry:
        """The model behind a name. Raises `ModelNotFound`, and `BadRequest` without a name or a default."""
        router = self._services.router
        target = router.locate(name, caller)
        return await asyncio.to_thread(self._entry, router, target, self._services.view(target.model))

    def _leaving(self) -> Iterator[tuple[ModelConfig, WorkerView]]:
        """Models of upstreams, each once."""
        names = {name for upstream in self._services.config.upstreams.values() for name in upstream.models}
        for name in sorted(names):
            yield ModelConfig(name=name, path=""), WorkerView(name=name, path="", state=State.READY)

    def _entry(self, router: Router, target: ResolvedName, view: WorkerView) -> CatalogEntry:
        path = target.model.path
        kind = kind_of_model(target.model, view.ready) or TEXT
        sampling = router.filled(target).sampling
        return CatalogEntry(target, view, self._facts.read(path), sampling, modalities(path, view.ready), kind)
