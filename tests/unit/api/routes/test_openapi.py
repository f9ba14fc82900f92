"""The OpenAPI document describes accepted bodies; and every reference in it leads somewhere."""

from __future__ import annotations

from typing import Any

from api.app import ROUTES
from api.routes.document import OpenApiDocument


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return here + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def test_bodies_have_openais_fields_and_are_open() -> None:
    """All generating endpoints have a body with OpenAI's field names, and may have unknown ones."""
    document = OpenApiDocument(ROUTES).whole
    schemas = document["components"]["schemas"]
    for path, name, field in (
        ("/v1/chat/completions", "ChatRequest", "max_completion_tokens"),
        ("/v1/completions", "CompletionRequest", "prompt"),
        ("/v1/responses", "ResponseRequest", "previous_response_id"),
        ("/v1/messages", "MessageRequest", "stop_sequences"),
        ("/v1/messages/count_tokens", "CountTokensRequest", "thinking"),
    ):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert field in schemas[name]["properties"]
        assert "additionalProperties" not in schemas[name]
    for reference in references(document):
        node: Any = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_operators_bodies_are_told() -> None:
    """Each POST under /farm names its fields, with what they must be."""
    document = OpenApiDocument(ROUTES).whole
    posts = {
        path: item["post"] for path, item in document["paths"].items() if path.startswith("/farm") and "post" in item
    }
    assert len(posts) == 15
    references = {path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()}
    schemas = document["components"]["schemas"]
    bodies = {path: schemas[each["$ref"].rpartition("/")[2]] for path, each in references.items()}
    assert all(body["additionalProperties"] is False for body in bodies.values())
    assert bodies["/farm/models/load"]["required"] == ["source"]
    assert {"key", "rpm"} <= set(bodies["/farm/keys/limits"]["properties"])
