"""OpenAPI 3.1 document of the operations, with schemas made from the structs that decode and encode bodies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from gateway.api.endpoint_makers import Maker
from gateway.errors import ErrorBody

Schema = dict[str, Any]

VERSION: Final = "3.1.1"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
FORM: Final = "multipart/form-data"
# Statuses that the answer to any request can have.
ALWAYS: Final = (401, 403, 421, 429, 431, 500)
MEANINGS: Final = {
    400: "The request cannot be served as it is.",
    401: "No API key, or none that is valid.",
    403: "The client may not do this.",
    404: "There is no such model or response, or the key may not use it.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    421: "The URL's host is not a name that mlxd is configured to serve.",
    422: "The request is invalid; `detail` lists where.",
    429: "A limit of the key is reached, the model's queue is full, or too many requests had no valid key.",
    431: "The headers are too large.",
    500: "An internal error.",
    503: "The model or the daemon cannot serve now.",
    504: "The request's deadline was exceeded.",
}
_RETRYABLE: Final = frozenset({429, 503})
_REF: Final = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path, in the query or in a header."""

    name: str
    place: str
    schema: Mapping[str, Any]
    description: str
    # Whether a parameter in the path may contain slashes.
    has_slashes: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `maker` makes the endpoint. `extra` are fields of the body that have no effect, `events` are the types of a stream's
    events, `error` is the dialect's form of errors, and `errors` are the statuses of errors.
    """

    method: str
    path: str
    maker: Maker
    summary: str
    answer: Any
    body: type[Struct] | None = None
    extra: frozenset[str] = frozenset()
    events: Sequence[Any] = ()
    error: Any = ErrorBody
    errors: Sequence[int] = ALWAYS
    # Whether each event also has a `sequence_number`. It is added when the event is written.
    is_numbered: bool = False
    parameters: Sequence[Parameter] = ()
    # Whether a key is required; None if that depends on the configuration.
    needs_key: bool | None = True
    body_type: str = JSON
    media_type: str = JSON
    # Other media types of the answer, each with its description.
    media_types: Mapping[str, str] = field(default_factory=dict[str, str])
    stream_type: str = EVENTS
    # Statuses other than 200 whose body is also an `answer`.
    also: Mapping[int, str] = field(default_factory=dict[int, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def routed_path(self) -> str:
        """Path in the syntax of the router."""
        path = self.path
        for parameter in self.parameters:
            if parameter.has_slashes:
                path = path.replace(f"{{{parameter.name}}}", f"{{{parameter.name}:path}}")
        return path

    @property
    def id(self) -> str:
        """Unique id of the operation, from its method and path."""
        words = [word.strip("{}") for word in self.path.replace("-", "_").split("/") if word]
        return "_".join([self.method.lower(), *words] if words else [self.method.lower(), "root"])


def document(operations: Sequence[Operation], *, version: str, description: str) -> Schema:
    """Return the OpenAPI document, made of JSON types only."""
    components, references = _components(operations)
    paths: dict[str, Schema] = {}
    for operation in operations:
        if operation.method == "HEAD":
            continue
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, references)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    whole = {
        "openapi": VERSION,
        "info": {"title": "mlxd", "version": version, "description": description},
        "servers": [{"url": "/"}],
        "security": [{name: []} for name in schemes],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }
    # The schemas contain defaults that are Python objects. Encoding turns them into JSON types.
    return msgspec.json.decode(msgspec.json.encode(whole))


def _operation(operation: Operation, references: Mapping[Any, Schema]) -> Schema:
    document: Schema = {"operationId": operation.id, "summary": operation.summary}
    if operation.needs_key is not True:
        document["security"] = [] if operation.needs_key is False else [{}, {"bearer": []}, {"x-api-key": []}]
    if operation.parameters:
        document["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body is not None:
        document["requestBody"] = {
            "required": True,
            "content": {operation.body_type: {"schema": references[operation.body]}},
        }
    document["responses"] = _responses(operation, references)
    return document


def _parameter(parameter: Parameter) -> Schema:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": dict(parameter.schema),
        "description": parameter.description,
    }


def _responses(operation: Operation, references: Mapping[Any, Schema]) -> Schema:
    answer = references[operation.answer]
    content: Schema = {operation.media_type: {"schema": answer}}
    content |= {
        kind: {"schema": {"type": "string", "description": text}} for kind, text in operation.media_types.items()
    }
    if operation.events:
        # OpenAPI 3.1 cannot describe the individual events of a stream; OpenAPI 3.2 has `itemSchema` for this.
        data: Schema = {"anyOf": [references[event] for event in operation.events]}
        if operation.is_numbered:
            data |= {"properties": {"sequence_number": {"type": "integer"}}, "required": ["sequence_number"]}
        is_sse = operation.stream_type == EVENTS
        content[operation.stream_type] = {"x-itemSchema": _event(data) if is_sse else data}
    always = {"x-request-id": _header("Id of this request, as in mlxd's log.", is_required=True)}
    sent = {name: _header(text) for name, text in operation.headers.items()}
    responses: Schema = {"200": {"description": "The answer.", "headers": always | sent, "content": content}}
    for status, text in operation.also.items():
        responses[str(status)] = {"description": text, "headers": always, "content": {JSON: {"schema": answer}}}
    for status in sorted(operation.errors):
        headers = always if status != 431 else {}
        if status in _RETRYABLE:
            headers = headers | {"retry-after": _header("Seconds after which it may succeed.", kind="integer")}
        if status == 401:
            headers = headers | {"www-authenticate": _header("How to send a key.", is_required=True)}
        content = {JSON: {"schema": references[operation.error]}}
        responses[str(status)] = {"description": MEANINGS[status], "headers": headers, "content": content}
    return responses


def _event(data: Schema) -> Schema:
    """Return the schema of a server-sent event in OpenAPI 3.2's form. The event `[DONE]` at the end of OpenAI's streams
    is text, not JSON.
    """
    coded = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": coded}, "required": ["data"]}


def _qualified(struct: type) -> str:
    """Return a name such as `openai.ChatRequest`. The first part is the dialect, with `_out` for answers and `_tools`
    for tools; for a struct of another module, it is the module's name.
    """
    package, _, module = struct.__module__.rpartition(".")
    dialect = package.rpartition(".")[2]
    place = {"request": dialect, "response": f"{dialect}_out", "tools": f"{dialect}_tools"}.get(module, module)
    return f"{place}.{struct.__name__}"


def _header(description: str, kind: str = "string", *, is_required: bool = False) -> Schema:
    return {"description": description, "required": is_required, "schema": {"type": kind}}


def _components(operations: Sequence[Operation]) -> tuple[Schema, dict[Any, Schema]]:
    """Return the schemas of all structs by name, and the reference to each body, answer, event and error."""
    bodies = list(dict.fromkeys(each.body for each in operations if each.body is not None))
    answers = list(dict.fromkeys(shape for each in operations for shape in (each.answer, *each.events, each.error)))
    inputs, outputs = _structs(bodies), _structs(answers)
    references, schemas = msgspec.json.schema_components([*bodies, *answers], ref_template=_REF + "{name}")
    names = {_given_name(struct, schemas): struct for struct in (*inputs, *outputs)}
    for name, struct in names.items():
        hint = getattr(struct, "hint", None)
        if hint is not None:
            schemas[name]["allOf"] = [hint]
        if struct not in inputs:
            schemas[name]["required"] = _sent(struct)
    for operation in operations:
        if operation.body is not None:
            schemas[_given_name(operation.body, schemas)]["properties"] |= {
                name: {"description": "Accepted, without effect."} for name in sorted(operation.extra)
            }
    final = {name: _qualified(struct) for name, struct in names.items()}
    assert len(set(final.values())) == len(schemas), "two structs would share a name"
    renamed = {final[name]: _renamed(schema, final) for name, schema in schemas.items()}
    return renamed, {
        shape: _renamed(reference, final) for shape, reference in zip((*bodies, *answers), references, strict=True)
    }


def _structs(shapes: Iterable[Any]) -> dict[type[Struct], types.StructType]:
    """Return all structs that occur in these types."""
    structs: dict[type[Struct], types.StructType] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(types.multi_type_info(shapes))
    while waiting:
        shape = waiting.pop()
        if id(shape) in seen:
            continue
        seen.add(id(shape))
        if isinstance(shape, types.StructType):
            structs[shape.cls] = shape
        if isinstance(shape, types.Field):
            waiting.append(shape.type)
        elif isinstance(shape, types.Type):
            for name in shape.__struct_fields__:
                inner = getattr(shape, name)
                waiting += inner if isinstance(inner, tuple) else [inner]
    return structs


def _given_name(struct: type[Struct], schemas: Mapping[str, Any]) -> str:
    """Return the name that msgspec gives a struct. It contains the module's name only if another struct has the same
    plain name.
    """
    return struct.__name__ if struct.__name__ in schemas else f"{struct.__module__}.{struct.__name__}"


def _sent(struct: type[Struct]) -> list[str]:
    """Return the fields that are always sent, including fields with a default other than UNSET."""
    config = struct.__struct_config__
    tag = [config.tag_field] if config.tag_field is not None else []
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    return tag + [
        field.encode_name for field in info.fields if field.required or not (config.omit_defaults or _is_unset(field))
    ]


def _is_unset(field: types.Field) -> bool:
    """Whether the default of a field is UNSET. Such a field is left out of the JSON."""
    return not field.required and field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """Return the schema with its references changed to the final names."""
    if isinstance(schema, list):
        return [_renamed(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _REF + names[value.removeprefix(_REF)] if _is_reference(key, value) else _renamed(value, names)
        for key, value in schema.items()
    }


def _is_reference(key: str, value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_REF) and key != "description"
