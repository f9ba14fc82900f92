"""What the operator's routes share: work in a thread, because it reads a lot and streams must not wait; bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from litestar import Request
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody

from api.asgi.limits import OPERATOR_BYTES
from api.routes.generation import identity_of, process_of
from api.schemas.decoding import decode_body
from control.redis.clients import SyncRedis

Http = Request[Any, Any, Any]
P = ParamSpec("P")
T = TypeVar("T")


async def on_farm(request: Http, work: Callable[Concatenate[SyncRedis, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(client, …)`, whose errors are the response's."""
    return await asyncio.to_thread(work, process_of(request).sync_client, *args, **kwargs)


def taking(kind: type[msgspec.Struct]) -> type[Operation]:
    """The operation of a handler whose body is `kind`, for the OpenAPI document: the framework can't see raw bodies."""
    _, schemas = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schema: Any = schemas[kind.__name__]

    @dataclass
    class Taking(Operation):
        def __post_init__(self) -> None:
            self.request_body = RequestBody(
                required=True, content={"application/json": OpenAPIMediaType(schema=schema)}
            )

    return Taking


async def body_of(request: Http, kind: type[T]) -> T:
    """The request's body, decoded strictly. Raises RequestError naming the field at fault."""
    identity = identity_of(request)
    async with process_of(request).bodies.reading(request, OPERATOR_BYTES, identity.account) as body:
        return decode_body(body, kind)
