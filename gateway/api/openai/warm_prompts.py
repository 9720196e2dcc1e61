"""Warm prompts: chat requests in files, whose prompts are prefilled after each load of their model."""

from pathlib import Path
from typing import Final

from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.config.settings import Config, ConfigError, ModelConfig
from gateway.config.source import ConfigSource
from gateway.errors import ApiError
from protocol.to_worker import ChatPrompt, Generate

# Requests of clients have lower numbers, so they run first.
WARM_PRIORITY: Final = 1_000_000


class UnusableWarmPrompt(Exception):
    """Raised for a file that cannot be read, or is no chat request. It says why."""


def read_warm_prompt(file: str, model: ModelConfig, size_max: int) -> Generate:
    """Read the chat request in a file as a request that only fills the prefix cache. Its rid is 0. Raises
    `UnusableWarmPrompt`.
    """
    try:
        body = Path(file).read_bytes()
        if len(body) > size_max:
            raise UnusableWarmPrompt(f"{file} is larger than max_body ({size_max} bytes)")
        request, _ = decode_chat(body)
        generate = lower_chat(request, model, lambda: 0, 0)[0]
    except OSError as error:
        raise UnusableWarmPrompt(f"cannot read {file}: {error.strerror}") from None
    except ApiError as error:
        raise UnusableWarmPrompt(f"{file} is no chat request: {error.message}") from None
    if request.model and request.model not in model.names:
        raise UnusableWarmPrompt(f"{file} is for another model, {request.model!r}: leave 'model' out")
    prompt = generate.prompt
    if isinstance(prompt, ChatPrompt) and prompt.media:
        raise UnusableWarmPrompt(f"{file} has images, video, audio or files; warm prompts are of text")
    return Generate(
        0,
        prompt,
        generate.sampling,
        max_tokens=0,
        priority=WARM_PRIORITY,
        cache_salt=generate.cache_salt,
        truncate=generate.truncate,
        cuts_tokens=generate.cuts_tokens,
    )


def check_warm_prompts(config: Config) -> Config:
    """Return the configuration if the warm prompts of all models can be used. Raises `ConfigError`."""
    for model in config.models.values():
        for file in model.warm:
            try:
                read_warm_prompt(file, model, config.server.max_body_bytes)
            except UnusableWarmPrompt as error:
                raise _error(config, model, error) from None
    return config


def _error(config: Config, model: ModelConfig, error: UnusableWarmPrompt) -> ConfigError:
    source = ConfigSource(config.config_path)
    source.read(required=False)
    return source.error(f"warm: {error}", ("models", model.name, "warm"))
