"""Chat templates of a model: which of its named templates renders a chat.

The gateway shows clients what the templates can do, and the worker renders chats and detects the model's family with
them.
"""

from dataclasses import dataclass
from typing import Any, Final, Self, cast

ADDITIONAL_TEMPLATES: Final = "additional_chat_templates"
_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
# A template for answers from documents, which no request has: it never renders a plain chat.
_RAG: Final = "rag"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates of chats without and with tools; each is empty if the model's files have none for such chats."""

    plain: str = ""
    with_tools: str = ""
    # Names of all templates of the model's files, for the message of a chat that none of them renders.
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, chat_template: Any) -> Self:
        """Choose from a template, from templates by name, or from a list as in tokenizer_config.json.

        As in transformers, `default` renders plain chats and `tool_use` chats with tools. Without a `default`, the only
        template renders all chats.
        """
        if isinstance(chat_template, str):
            return cls(chat_template, chat_template, (_DEFAULT,))
        named = _named(chat_template)
        only = next(iter(named)) if len(named) == 1 else _DEFAULT
        plain = named.get(only if only != _RAG else _DEFAULT, "")
        return cls(plain, named.get(_TOOL_USE, plain), tuple(named))

    @property
    def texts(self) -> tuple[str, ...]:
        """The templates in use. The one for tools is first, because it shows most of the model's markup."""
        return tuple(text for text in dict.fromkeys((self.with_tools, self.plain)) if text)


def _named(chat_template: Any) -> dict[str, str]:
    if isinstance(chat_template, list):
        entries = [cast(dict[str, Any], entry) for entry in cast(list[Any], chat_template) if isinstance(entry, dict)]
        chat_template = {entry.get("name"): entry.get("template") for entry in entries}
    named = cast(dict[Any, Any], chat_template) if isinstance(chat_template, dict) else {}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
