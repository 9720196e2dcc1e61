"""Chat messages to prompt text, by the model's own template."""

from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from protocol.failures import Code
from protocol.messages import ChatPrompt
from worker.errors import RequestInvalid

# What a template that meets messages of another shape than it expects has been seen to raise, and its neighbours.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class Renderer:
    """Renders with exactly the variables that a request gives: what it does not mention, the template decides."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A model with a renderer in code (no Jinja template) is rendered by mlx-lm's wrapper.
        self._template: str | None = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        self.has_template = bool(tokenizer.has_chat_template)
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

    def render(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> str:
        """The prompt's text, special tokens included. Raises `RequestInvalid`."""
        if not self.has_template:
            raise RequestInvalid(
                Code.UNSUPPORTED, "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            return self._render(prompt, opens_answer and not prompt.continue_final)
        except _REFUSALS as error:
            raise RequestInvalid(
                Code.TEMPLATE_ERROR, f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def probe(self) -> tuple[str, str]:
        """A one-message chat rendered with and without the generation prompt; ("", "") where that is not possible."""
        messages = [{"role": "user", "content": "x"}]
        try:
            opened = self.render(ChatPrompt(messages))
            closed = self.render(ChatPrompt(messages), opens_answer=False)
        except RequestInvalid:
            return "", ""
        return (opened, closed) if opened.startswith(closed) else ("", "")

    def _render(self, prompt: ChatPrompt, opens_answer: bool) -> str:
        if self._template is None:
            return str(
                self._tokenizer.apply_chat_template(
                    prompt.messages,
                    tools=prompt.tools or None,
                    tokenize=False,
                    add_generation_prompt=opens_answer,
                    continue_final_message=prompt.continue_final,
                    **prompt.template_kwargs,
                )
            )
        rendered, _ = render_jinja_template(
            conversations=[prompt.messages],
            tools=cast(Any, prompt.tools or None),
            chat_template=self._template,
            add_generation_prompt=opens_answer,
            continue_final_message=prompt.continue_final,
            **{**self._special_tokens, **prompt.template_kwargs},
        )
        return str(rendered[0])
