"""Lowering of thinking effort and budget to one `ThinkingBudget`. Chat clients have many fields for them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol

from msgspec import Meta, Struct

from gateway.api.common.canonical import EFFORTS, ThinkingBudget
from gateway.api.common.request_fields import words
from gateway.config.settings import ThinkingDefaults
from gateway.errors import invalid_choice
from protocol.to_worker import TOKENS_MAX, TokenCount

# Types of Anthropic's `thinking`. With the last two, the model decides.
_TYPES: Final[dict[str, bool | None]] = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


class ReasoningSpec(Struct, frozen=True):
    """`reasoning` of OpenRouter and the Responses API."""

    effort: Annotated[str, Meta(max_length=32), words(*EFFORTS)] | None = None
    max_tokens: TokenCount | None = None
    budget: TokenCount | None = None
    enabled: bool | None = None


class AnthropicThinking(Struct, frozen=True):
    """Anthropic's `thinking`."""

    type: Annotated[str, Meta(max_length=32), words(*_TYPES)]
    budget_tokens: TokenCount | None = None


class ThinkingFields(Protocol):
    """Request fields that control thinking."""

    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def reasoning(self) -> ReasoningSpec | None: ...
    @property
    def thinking(self) -> AnthropicThinking | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def thinking_budget(self) -> int | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def of_config(defaults: ThinkingDefaults | None) -> ThinkingBudget:
    """Return the configured thinking budget."""
    if defaults is None:
        return ThinkingBudget()
    thinking = ThinkingBudget(defaults.enabled, budget=defaults.budget)
    if defaults.effort is not None:
        thinking = thinking.over(ThinkingBudget.of_effort(defaults.effort, "effort"))
    return ThinkingBudget(False) if thinking.is_enabled is False else thinking


def lower_thinking(request: ThinkingFields, default: ThinkingDefaults | None = None) -> ThinkingBudget:
    """Merge all fields into one budget. Raises `BadRequest`.

    The fields in order of precedence, the strongest first: `chat_template_kwargs`, `enable_thinking` and
    `thinking_budget`, `thinking`, `reasoning`, `reasoning_effort`, and the configured default.
    """
    plain = ThinkingBudget(request.enable_thinking, budget=request.thinking_budget)
    thinking = _of_template(request.chat_template_kwargs or {}).over(plain)
    if request.thinking is not None:
        thinking = thinking.over(_of_type(request.thinking))
    if request.reasoning is not None:
        thinking = thinking.over(_of_reasoning(request.reasoning))
    if request.reasoning_effort is not None:
        thinking = thinking.over(ThinkingBudget.of_effort(request.reasoning_effort, "reasoning_effort"))
    return thinking.under(of_config(default))


def _of_template(kwargs: Mapping[str, Any]) -> ThinkingBudget:
    """Return the budget in the template's arguments. Values that only the template understands are left out."""
    switches = [kwargs.get("enable_thinking"), kwargs.get("thinking")]
    is_enabled = next((switch for switch in switches if isinstance(switch, bool)), None)
    budget, effort = kwargs.get("thinking_budget"), kwargs.get("reasoning_effort")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        budget = None
    thinking = ThinkingBudget(is_enabled, budget=None if budget is None else min(budget, TOKENS_MAX))
    if isinstance(effort, str) and effort in EFFORTS:
        thinking = thinking.over(ThinkingBudget.of_effort(effort, "chat_template_kwargs.reasoning_effort"))
    return thinking


def _of_type(spec: AnthropicThinking) -> ThinkingBudget:
    if spec.type not in _TYPES:
        raise invalid_choice(spec.type, _TYPES, "thinking.type")
    return ThinkingBudget(_TYPES[spec.type], budget=None if spec.type == "disabled" else spec.budget_tokens)


def _of_reasoning(spec: ReasoningSpec) -> ThinkingBudget:
    budget = spec.max_tokens if spec.budget is None else spec.budget
    thinking = ThinkingBudget(spec.enabled, budget=budget)
    return thinking if spec.effort is None else thinking.over(ThinkingBudget.of_effort(spec.effort, "reasoning.effort"))
