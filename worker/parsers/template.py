"""A chat template, rendered without a tokenizer for one small message: what it leaves open at the end."""

from datetime import UTC, datetime
from typing import Any


class BrokenTemplate(ValueError):
    """The template does not render."""


def render_prompt(template: str, tools: list[dict[str, Any]], thinking: bool) -> str:
    """The prompt for the message `Hi`. Raises `BrokenTemplate`."""
    # Imported here because it costs more than the rest of the package.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now(UTC).strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    switches = {"enable_thinking": thinking, "thinking": thinking, "reasoning": thinking}
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": "Hi"}], tools=tools or None, add_generation_prompt=True,
            bos_token="", eos_token="", raise_exception=raise_exception, strftime_now=strftime_now, **switches,
        )  # fmt: skip
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenTemplate(f"the template does not render: {error}") from error
