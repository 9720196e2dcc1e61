"""Shell completion of model names. It only reads files, so that it is quick and needs no daemon."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from gateway.ctl.model_verbs.offline import readable_config
from gateway.model_files.hub_cache import cached_models


def complete_models(incomplete: str) -> list[str]:
    """Complete names and aliases from the configuration."""
    # A broken file completes nothing: the shell cannot show an error here, and the verb will.
    config = readable_config()
    models = config.models.values() if config is not None else ()
    names = [name for model in models for name in model.names if "*" not in name]
    return [name for name in names if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Complete names and aliases of configured models, and repositories in the Hugging Face cache."""
    names = [*complete_models(incomplete), *(name for name in cached_models() if name.startswith(incomplete))]
    return list(dict.fromkeys(names))


def model_argument(
    help: str, metavar: str | None = None, complete: Callable[[str], list[str]] = complete_models
) -> Any:
    """Make a command-line argument that names a model."""
    return typer.Argument(help=help, show_default=False, metavar=metavar, autocompletion=complete)


Model = Annotated[str, model_argument("A model's name or alias.")]
