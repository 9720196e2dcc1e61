"""Rendering of chat templates without a tokenizer: their text, and whether it leaves reasoning open."""

import json
import re
from datetime import UTC, datetime
from typing import Any, Final

# This tag marks the assistant's turns for training and has no effect on text.
_GENERATION: Final = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class BrokenTemplate(ValueError):
    """Raised when the template does not render."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    thinking: bool,
    opens_answer: bool = True,
) -> str:
    """Render the messages with every common switch for thinking set. Raises `BrokenTemplate`."""
    # The import is local because it costs more than the rest of the package.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now(UTC).strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    switches = {"enable_thinking": thinking, "thinking": thinking, "reasoning": thinking}
    try:
        return environment.from_string(_GENERATION.sub("", template)).render(
            messages=messages, tools=tools or None, add_generation_prompt=opens_answer,
            bos_token="", eos_token="", raise_exception=raise_exception, strftime_now=strftime_now, **switches,
        )  # fmt: skip
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenTemplate(f"the template does not render: {error}") from error
