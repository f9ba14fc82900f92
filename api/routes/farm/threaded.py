"""Bodies of the operator's routes, and their work: in a thread, because it reads a lot and streams must not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from api.asgi.limits import OPERATOR_BYTES
from api.routes.generation import Http, identity_of, process_of
from api.schemas.decoding import decode_body
from control.redis.clients import SyncRedis

P = ParamSpec("P")
T = TypeVar("T")


async def on_farm(request: Http, work: Callable[Concatenate[SyncRedis, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(client, …)`, whose errors are the response's."""
    return await asyncio.to_thread(work, process_of(request).sync_client, *args, **kwargs)


async def body_of(request: Http, kind: type[T]) -> T:
    """The request's body, decoded strictly. Raises RequestError naming the field at fault."""
    identity = identity_of(request)
    async with process_of(request).bodies.reading(request, OPERATOR_BYTES, identity.account) as body:
        return decode_body(body, kind)
