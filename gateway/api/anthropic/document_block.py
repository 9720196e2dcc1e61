"""Lowering of Anthropic's document blocks: PDFs, plain text, and content blocks."""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.api.anthropic.content_blocks import Block
from gateway.errors import BadRequest, Unsupported
from gateway.media.reference import document

Part = str | dict[str, Any]


def document_parts(block: Block, where: str, lower: Callable[[Block, str], list[Part]]) -> list[Part]:
    """Lower a document block. `lower` lowers the blocks inside it. Raises `BadRequest`."""
    heading = "\n".join(filter(None, (block.title, block.context)))
    match block.source:
        case {"type": "base64", "data": str(data)}:
            return [document(data, heading, where)]
        case {"type": "url", "url": str(url)}:
            return [document(url, heading, where, is_url=True)]
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return ["\n".join(filter(None, (heading, text)))]
        case {"type": "content", "content": list(content)}:
            parts = [
                part
                for index, inner in enumerate(_blocks(content, f"{where}.source.content"))
                for part in _inner(inner, f"{where}.source.content.{index}", lower)
            ]
            return [heading, *parts] if heading else parts
        case {"type": "file"}:
            raise Unsupported(f"{where}: there are no uploaded files here; send the document as base64.", where)
        case _:
            param = f"{where}.source"
            message = f"{param}: a document's source is of type base64, text, with data, or url or content."
            raise BadRequest(message, param, "invalid_value")


def refuse_citations(block: Block, where: str) -> None:
    """Raises `Unsupported` if a document or a search result asks for citations."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        param = f"{where}.citations"
        raise Unsupported(f"{param}: citations are not supported; leave them disabled.", param)


def _blocks(content: list[Any], where: str) -> list[Block]:
    try:
        return msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}.", where, "invalid_value") from None


def _inner(block: Block, where: str, lower: Callable[[Block, str], list[Part]]) -> list[Part]:
    if block.type not in ("text", "image"):
        message = f"{where}: a document's content has blocks of type text and image only."
        raise BadRequest(message, where, "invalid_value")
    return lower(block, where)
