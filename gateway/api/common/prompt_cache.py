"""Request field `prompt_cache_options`, which is the same in chat completions and Responses."""

from typing import Annotated

from msgspec import Meta, Struct


class PromptCacheOptions(Struct, frozen=True):
    """Options of the prefix cache. `mode` and `ttl` change nothing: every prefix is cached as long as there is room."""

    # Whether the prompt is only put into the prefix cache, and no output is generated.
    prewarm: bool | None = None
    mode: str | None = None
    ttl: str | None = None
    # Id of the response whose prompt this one is compared with, which Responses alone do.
    comparison_response_id: Annotated[str, Meta(max_length=200)] | None = None


def ignored_options(options: PromptCacheOptions | None, *more: str) -> list[str]:
    """Return the given options that change nothing: `mode`, `ttl` and `more`."""
    return [f"prompt_cache_options.{name}" for name in ("mode", "ttl", *more) if getattr(options, name, None)]


def is_prewarm(options: PromptCacheOptions | None) -> bool:
    return options is not None and bool(options.prewarm)
