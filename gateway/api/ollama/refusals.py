"""Ollama routes that mlxd refuses, such as those that create or copy models: mlxd's models come from the Hugging Face
Hub and are listed in the configuration.
"""

from typing import Final

from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError

# Each entry has a method, a path, and advice on how to do the same with mlxd.
REFUSED: Final = (
    ("POST", "/api/create", "Give a model its sampling, template and profiles in mlxd.toml."),
    ("POST", "/api/copy", "Give a model another name with 'aliases' in mlxd.toml."),
    ("DELETE", "/api/delete", "Delete a model with: mlxctl rm MODEL."),
    ("POST", "/api/push", "There is no registry to push to."),
    ("POST", "/api/blobs/{digest}", "Models are folders of safetensors, not blobs."),
    ("HEAD", "/api/blobs/{digest}", "Models are folders of safetensors, not blobs."),
)


class Refusal:
    """ASGI endpoint that answers 501 with advice."""

    def __init__(self, advice: str) -> None:
        self._advice = advice

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = f"{scope['method']} {scope['path'][:100]}"
        raise ApiError(501, f"mlxd does not serve {route}. {self._advice}", code="not_implemented")
