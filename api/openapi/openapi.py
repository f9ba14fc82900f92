"""The request bodies in the OpenAPI document; handlers decode them by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
from litestar.openapi.spec import OpenAPI, OpenAPIMediaType, Operation, RequestBody

from api.openapi.bounds import add_bounds

_bodies: dict[type[msgspec.Struct], bool] = {}
"""Types of bodies; True for one that may have unknown fields."""


def taking(kind: type[msgspec.Struct], *, open_ended: bool = False) -> type[Operation]:
    """The operation of a handler whose body is `kind`. All handlers are known when the first document is made.

    `open_ended`: the body may have unknown fields, which are ignored with a warning.
    """
    _bodies[kind] = open_ended

    @dataclass
    class Taking(Operation):
        def __post_init__(self) -> None:
            schema = cast(Any, _components()[0][kind])
            self.request_body = RequestBody(
                required=True, content={"application/json": OpenAPIMediaType(schema=schema)}
            )

    return Taking


def add_bodies(document: OpenAPI) -> None:
    """Put the schemas that the operations refer to beside those that the framework found by itself."""
    # Plain mappings are written as they are, though the types name the framework's own classes.
    cast(dict[str, Any], document.components.schemas).update(_components()[1])


@cache
def _components() -> tuple[dict[type[msgspec.Struct], dict[str, Any]], dict[str, Any]]:
    """References to the bodies' types, and their schemas by name."""
    references, schemas = msgspec.json.schema_components(_bodies, ref_template="#/components/schemas/{name}")
    for kind, open_ended in _bodies.items():
        if open_ended:
            schemas[kind.__name__].pop("additionalProperties", None)
    add_bounds(schemas)
    return dict(zip(_bodies, references, strict=True)), schemas
