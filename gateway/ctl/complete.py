"""Shell completion of model names, from the files alone, so that it is quick and needs no daemon."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from gateway.ctl.model_verbs.offline import readable_config


def complete_models(incomplete: str) -> list[str]:
    """Names and aliases of the configuration."""
    # A shell has no place to say that it is broken; the verb itself will.
    config = readable_config()
    models = config.models.values() if config is not None else ()
    names = [name for model in models for name in model.names if "*" not in name]
    return [name for name in names if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Names of the configuration, and repositories in the Hugging Face cache."""
    from gateway.model_files.hub_cache import cached_models

    names = [*complete_models(incomplete), *(name for name in cached_models() if name.startswith(incomplete))]
    return list(dict.fromkeys(names))


def a_model(help: str, metavar: str | None = None, complete: Callable[[str], list[str]] = complete_models) -> Any:
    """An argument that names a model."""
    return typer.Argument(help=help, show_default=False, metavar=metavar, autocompletion=complete)


Model = Annotated[str, a_model("A model's name or alias.")]
