"""Operations of files and batches, in the dialects of OpenAI and Anthropic."""

from functools import partial
from typing import Any, Final

from gateway.api.anthropic.response import AnthropicErrorBody
from gateway.api.batches import files, message_batches, openai_batches
from gateway.api.batches.files import FileEndpoints
from gateway.api.batches.line_results import MessageBatchResult
from gateway.api.batches.message_batches import MessageBatches
from gateway.api.batches.openai_batches import OpenAIBatches
from gateway.api.batches.paging import BINARY, DEFAULT_LIMIT, JSON_LINES
from gateway.api.parts import on_batches, on_files, on_message_batches
from gateway.api.system.openapi import ALWAYS, FORM, Operation, Parameter

_STORED: Final = (*ALWAYS, 400, 404, 503)
_SENT: Final = (*_STORED, 408, 413)
_IGNORED: Final = {"x-mlxd-ignored": "Unknown fields of the request, ignored."}
_TEXT: Final = {"type": "string"}


def _id(what: str) -> Parameter:
    return Parameter("id", "path", _TEXT | {"minLength": 1}, f"The id of a {what}.")


def _limit(default: int, most: int) -> Parameter:
    schema: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter("limit", "query", schema, "Most items in a page.")


_AFTER: Final = Parameter("after", "query", _TEXT, "The page starts after the item with this id.")
_files = on_files(FileEndpoints.upload_or_list)
_one_file = on_files(FileEndpoints.get_or_delete)
_FILES: Final = (
    Operation(
        "POST",
        "/v1/files",
        _files,
        "Upload the requests of a batch: a JSON object in each line.",
        files.FileObject,
        files.FileUpload,
        errors=_SENT,
        body_type=FORM,
        headers=_IGNORED,
    ),
    Operation(
        "GET",
        "/v1/files",
        _files,
        "List files.",
        files.FileList,
        errors=_STORED,
        parameters=(
            _AFTER,
            _limit(files.PAGE_MAX, files.PAGE_MAX),
            Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "`desc` is newest first."),
            Parameter("purpose", "query", _TEXT, f"List only files of this purpose: {' or '.join(files.PURPOSES)}."),
        ),
    ),
    Operation(
        "GET",
        "/v1/files/{id}",
        _one_file,
        "Get a file's description.",
        files.FileObject,
        errors=_STORED,
        parameters=(_id("file"),),
    ),
    Operation(
        "DELETE",
        "/v1/files/{id}",
        _one_file,
        "Delete a file.",
        files.DeletedFile,
        errors=_STORED,
        parameters=(_id("file"),),
    ),
    Operation(
        "GET",
        "/v1/files/{id}/content",
        on_files(FileEndpoints.content),
        "Get a file's content.",
        str,
        errors=_STORED,
        parameters=(_id("file"),),
        media_type=BINARY.decode(),
    ),
)
_batches = on_batches(OpenAIBatches.create_or_list)
_BATCHES: Final = (
    Operation(
        "POST",
        "/v1/batches",
        _batches,
        "Create a batch of an uploaded file. Its requests run while nothing else does.",
        openai_batches.OpenAIBatch,
        openai_batches.BatchRequest,
        errors=_SENT,
        headers=_IGNORED,
    ),
    Operation(
        "GET",
        "/v1/batches",
        _batches,
        "List batches.",
        openai_batches.BatchList,
        errors=_STORED,
        parameters=(_AFTER, _limit(DEFAULT_LIMIT, openai_batches.PAGE_MAX)),
    ),
    Operation(
        "GET",
        "/v1/batches/{id}",
        on_batches(OpenAIBatches.get),
        "Get a batch.",
        openai_batches.OpenAIBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    Operation(
        "POST",
        "/v1/batches/{id}/cancel",
        on_batches(OpenAIBatches.cancel),
        "Cancel a batch.",
        openai_batches.OpenAIBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
)
_message_batches = on_message_batches(MessageBatches.create_or_list)
_one_message_batch = on_message_batches(MessageBatches.get_or_delete)
_messages = partial(Operation, error=AnthropicErrorBody)
_MESSAGE_BATCHES: Final = (
    _messages(
        "POST",
        "/v1/messages/batches",
        _message_batches,
        "Create a batch of messages. Its requests run while nothing else does.",
        message_batches.MessageBatch,
        message_batches.MessageBatchRequest,
        errors=_SENT,
        headers=_IGNORED,
    ),
    _messages(
        "GET",
        "/v1/messages/batches",
        _message_batches,
        "List batches of messages.",
        message_batches.MessageBatchList,
        errors=_STORED,
        parameters=(
            Parameter("after_id", "query", _TEXT, "The page starts after the batch with this id."),
            Parameter("before_id", "query", _TEXT, "The page ends before the batch with this id."),
            _limit(DEFAULT_LIMIT, message_batches.PAGE_MAX),
        ),
    ),
    _messages(
        "GET",
        "/v1/messages/batches/{id}",
        _one_message_batch,
        "Get a batch of messages.",
        message_batches.MessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "DELETE",
        "/v1/messages/batches/{id}",
        _one_message_batch,
        "Delete a batch of messages that has ended, with its results.",
        message_batches.DeletedMessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "POST",
        "/v1/messages/batches/{id}/cancel",
        on_message_batches(MessageBatches.cancel),
        "Cancel a batch of messages.",
        message_batches.MessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "GET",
        "/v1/messages/batches/{id}/results",
        on_message_batches(MessageBatches.results),
        "Get the results of a batch of messages that has ended: a JSON object in each line.",
        MessageBatchResult,
        errors=_STORED,
        parameters=(_id("batch"),),
        media_type=JSON_LINES.decode(),
    ),
)
BATCH_OPERATIONS: Final = (*_FILES, *_BATCHES, *_MESSAGE_BATCHES)
