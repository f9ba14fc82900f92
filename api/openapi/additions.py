"""What is added to the framework's OpenAPI document.

The framework knows paths, parameters and annotated answers. Bodies that are written as bytes, the events of streams,
the headers of generating requests and the shape of all errors are added here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.errors.errors import Error
from api.openapi.answered import ANSWERED, Answered, answered
from api.openapi.bounds import bound_number
from control.bounds import RANGES

JsonObject = dict[str, Any]

_METHODS = ("get", "post", "put", "patch", "delete")
_ERROR = {"$ref": "#/components/responses/Error"}
_HEADERS: list[JsonObject] = [
    {
        "name": "Last-Event-ID",
        "description": "The id of the last event received: the stream continues after it, on any API process.",
        "schema": {"type": "string", "pattern": r"^[0-9a-f]{32}:[0-9]{1,9}\.[0-9]{1,9}(,[0-9]{1,9}\.[0-9]{1,9})*$"},
        "example": "1f0c8a52e9d24c0f9e6a7b3d5c418f20:17.1",
    },
    {
        "name": "Idempotency-Key",
        "description": "The same key with the same body joins the existing request; with another body it is a 409.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "X-On-Disconnect",
        "description": "Action when the last client leaves: cancel, continue, or cancel after a number of seconds.",
        "schema": {"anyOf": [{"enum": ["cancel", "continue"]}, {"type": "string", "pattern": "^[0-9]{1,8}$"}]},
    },
]


def complete(document: JsonObject) -> JsonObject:
    """A copy of the framework's document with these additions."""
    completed: JsonObject = msgspec.json.decode(msgspec.json.encode(document))
    components = completed.setdefault("components", {})
    references, schemas = _schemas()
    others: JsonObject = components.get("schemas", {})
    if twice := [name for name in schemas if name in others and schemas[name] != others[name]]:
        raise ValueError(f"two types are named alike, and one would be shown for the other: {', '.join(twice)}")
    components["schemas"] = dict(sorted((others | schemas).items()))
    content = {"application/json": {"schema": references[Error]}}
    components["responses"] = {"Error": {"description": "The error, in OpenAI's shape.", "content": content}}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}}
    completed["security"] = [{"key": []}, {}]
    for path, methods in completed["paths"].items():
        for method in _METHODS:
            if method in methods:
                _complete_operation(methods[method], answered(method, path), references)
                for parameter in methods[method].get("parameters", []):
                    if parameter["name"] in RANGES:
                        bound_number(parameter["schema"], RANGES[parameter["name"]])
    return completed


def _schemas() -> tuple[dict[Any, JsonObject], JsonObject]:
    """References to the answers' types, and their schemas by name."""
    kinds = {
        kind
        for each in ANSWERED.values()
        for kind in (each.whole, each.unready, each.refusal, *each.events, *each.lines)
    }
    ordered = sorted(kinds - {None}, key=str)
    references, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        _require_defaults(schema)
    return dict(zip(ordered, references, strict=True)), schemas


def _require_defaults(schema: JsonObject) -> None:
    """In an answer a field with a default is always there."""
    for name, property_ in schema.get("properties", {}).items():
        if "default" in property_:
            del property_["default"]
            schema.setdefault("required", []).append(name)


def _complete_operation(operation: JsonObject, answered: Answered | None, references: dict[Any, JsonObject]) -> None:
    text = operation.get("description") or ""
    operation["summary"] = text.partition("\n")[0].partition(". ")[0].rstrip(".") or operation.get("summary", "")
    responses: JsonObject = operation["responses"]
    # The framework's own shape of a refusal is never sent.
    operation["responses"] = {status: each for status, each in responses.items() if status < "4"}
    operation["responses"] |= {"4XX": _ERROR, "5XX": _ERROR}
    for response in operation["responses"].values():
        if not response.get("headers", True):
            del response["headers"]
    if answered is None:
        return
    if answered.refusal is not Error:
        content = {"application/json": {"schema": references[answered.refusal]}}
        refusal: JsonObject = {"description": "The error.", "content": content}
        operation["responses"] |= {"4XX": refusal, "5XX": refusal}
    content = {}
    if answered.whole is not None:
        content["application/json"] = {"schema": references[answered.whole]}
    if answered.events:
        content["text/event-stream"] = _stream([references[kind] for kind in answered.events])
    if answered.lines:
        content["application/x-ndjson"] = _lines([references[kind] for kind in answered.lines])
    if answered.events or answered.lines:
        parameters = {parameter["name"].lower() for parameter in operation.get("parameters", [])}
        headers = _HEADERS if operation.get("requestBody") else _HEADERS[:1]
        headers = headers if answered.events else _HEADERS[1:]  # lines have no ids
        operation.setdefault("parameters", []).extend(
            {"in": "header", "required": False, **header}
            for header in headers
            if header["name"].lower() not in parameters
        )
    if content:
        operation["responses"]["200"] = {"description": "The answer.", "content": content}
    else:
        del operation["responses"]["200"]
    if answered.unready is not None:
        content = {"application/json": {"schema": references[answered.unready]}}
        operation["responses"]["503"] = {"description": "Not ready.", "content": content}


def _stream(kinds: list[JsonObject]) -> JsonObject:
    """Server-sent events; OpenAPI 3.1 has no field for the types of their data."""
    text = "Events with `id: <request>:<seq>.<part>`, comments between them, `data: [DONE]` at the end."
    return {"schema": {"type": "string", "description": text}, "x-event-data": {"anyOf": kinds}}


def _lines(kinds: list[JsonObject]) -> JsonObject:
    """Lines of JSON; OpenAPI 3.1 has no field for the types of lines either."""
    text = "Lines of JSON, with no empty ones; the last one has `done: true`, or an error."
    return {"schema": {"type": "string", "description": text}, "x-line-data": {"anyOf": kinds}}
