"""Catalog of configured models: each with its worker's state and the facts of its files, for lists in all forms."""

import asyncio
import time
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
    """One name of a list: a model, or a profile or an adapter of it.

    `modalities` and `kind` (one of `protocol.kinds`) are those of its worker, before a load those of its files.
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
        """The model of which it is a profile or an adapter; empty for a model."""
        return self.model.name if self.profile or self.model.adapter else ""

    def source(self, caller: Caller) -> str:
        """Path of its weights, where the caller is an operator or it is a repository's; otherwise a name."""
        is_local = self.model.root.startswith((".", "/", "~"))
        return self.model.root if caller.is_admin or not is_local else self.parent or self.model.name

    @property
    def loaded_context(self) -> int | None:
        """Context that its worker serves now; None where it is not loaded."""
        ready = self.view.ready if self.view.state in (State.READY, State.DRAINING) else None
        return None if ready is None else ready.max_context

    @property
    def context(self) -> int | None:
        """Context that the worker serves, before a load the configured one; None while neither is known."""
        return self.view.ready.max_context if self.view.ready is not None else self.model.context or None

    @property
    def longest_context(self) -> int | None:
        """Context that the worker serves, before a load the longest that its configuration and its files allow."""
        if self.view.ready is not None:
            return self.view.ready.max_context
        limits = [limit for limit in (self.model.context, self.facts.context) if limit]
        return min(limits, default=None)

    @property
    def kv_bits(self) -> int:
        """Bits per number of its KV, before a load as configured; 0 where it is not quantized."""
        return self.view.ready.kv_bits if self.view.ready is not None else self.model.kv_bits or 0

    @property
    def chat_template(self) -> str:
        return self.model.chat_template or self.facts.chat_template

    @property
    def knows_tools(self) -> bool:
        """Whether its chat template renders tools."""
        return "tools" in self.chat_template


class Catalog:
    """The models of the configuration in force and of its peers, as a caller may see them."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.created_s = int(time.time())
        self._facts = FactsReader()

    async def list(self, caller: Caller) -> list[CatalogEntry]:
        """Models that `caller` may use: the configuration's in its order, with profiles and adapters, then peers'."""
        services = self.services
        views = {view.name: view for view in services.pool.workers()}
        every = (each for model in services.config.models.values() for each in (model, *model.adapted))
        models = caller.usable(every)
        targets = [
            (ResolvedName(model, profile), views[model.name])
            for model in models
            for profile in ("", *(() if model.adapter else model.profiles))
        ]
        targets += [(ResolvedName(model), view) for model, view in services.fleet.models() if caller.may_use(model)]
        if caller.may_leave:
            known = {target.model.name for target, _ in targets}
            targets += [
                (ResolvedName(model), view)
                for model, view in self._upstream_models()
                if model.name not in known and caller.may_use(model)
            ]
        router = services.router

        def entries() -> list[CatalogEntry]:
            return [self._entry(router, target, view) for target, view in targets]

        return await asyncio.to_thread(entries)

    async def find(self, name: str, caller: Caller) -> CatalogEntry:
        """The model behind a name. Raises `ModelNotFound`, and `BadRequest` without a name or a default."""
        router = self.services.router
        target = router.locate(name, caller)
        return await asyncio.to_thread(self._entry, router, target, self.services.view(target.model))

    def _upstream_models(self) -> Iterator[tuple[ModelConfig, WorkerView]]:
        """Models of upstreams, each once."""
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
