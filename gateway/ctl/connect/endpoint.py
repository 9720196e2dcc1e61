"""Address, model and key that a client of this mlxd is given."""

import os
from typing import TYPE_CHECKING, Final

import typer

from gateway.config.address import from_here, is_daemon_url
from gateway.config.settings import url_of
from gateway.ctl.connect.model_choice import context_of
from gateway.ctl.model_verbs.offline import ServedModel, daemon, read_config
from gateway.failed import CommandFailed
from gateway.media.modalities import modalities
from gateway.state_dir.home_paths import default_home, keys_path

if TYPE_CHECKING:
    from gateway.client_setup.client_setups import Endpoint

KEY_VARIABLE: Final = "MLXD_KEY"


def clients_key() -> str:
    """Return the client's key; empty if mlxd has no keys. Raises `CommandFailed` if it has some and none is given."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    # The key file makes keys mandatory, even when it is empty.
    if not key and keys_path(default_home()).exists():
        raise CommandFailed(
            f"mlxd has API keys: put one of this client into {KEY_VARIABLE}, such as "
            f"export {KEY_VARIABLE}=$(mlxctl keys create NAME)"
        )
    return key


def endpoint_of(model: ServedModel, url: str | None = None) -> "Endpoint":
    """Build the endpoint of the running daemon, or the one that the configuration describes. Raises `CommandFailed`."""
    from gateway.client_setup.client_setups import DEFAULT_CONTEXT, Endpoint

    status, key = daemon(), clients_key()
    if url and not is_daemon_url(url):
        raise typer.BadParameter("it is mlxd's address, such as http://mac.local:8484", param_hint="--url")
    address = url or from_here(status.url if status is not None else url_of(read_config().server))
    return Endpoint(
        url=address.rstrip("/").removesuffix("/v1"),
        model=model.name,
        context=context_of(model) or DEFAULT_CONTEXT,
        key=key,
        takes_images="image" in modalities(model.path, None),
    )
