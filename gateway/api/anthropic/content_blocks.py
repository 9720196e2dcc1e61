"""Messages of an Anthropic conversation, and the blocks of their content."""

from typing import Annotated, Any, Final

from msgspec import Struct

from gateway.api.common.doc_hints import known, words

# Types of blocks that prompts have a form for.
SHOWN: Final = ("text", "image", "document", "search_result", "tool_reference", "tool_use", "tool_result", "thinking")
BLOCKS: Final = (*SHOWN, "redacted_thinking")


class Block(Struct, frozen=True):
    """Content block of any type. Its `type` decides which of the fields apply."""

    # Other types than those shown are an error in user messages, and are left out of other messages.
    type: Annotated[str, known(*BLOCKS)]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    # The setting of a document or search result, or the citations of an answer's text.
    citations: dict[str, Any] | list[Any] | None = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, words("user", "assistant", "system")]
    content: str | list[Block]
