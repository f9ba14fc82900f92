"""Bodies of the operator's routes, and their work: in a thread, because it reads a lot and streams must not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from api.http.bodies import OPERATOR_BYTES
from api.routes.generation import Http, identity_of, process_of
from api.schemas.decoding import decode_body
from control.redis.clients import SyncRedis

P = ParamSpec("P")
T = TypeVar("T")


async def on_farm(request: Http, work: Callable[Concatenate[SyncRedis, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(client, …)`, whose errors are the response's.

    Of a GET it is a read that all may share who ask the same within a second, unless the client sends `Cache-Control:
    no-cache`; its arguments must be all that the answer depends on. Anything else is an act, which the next reads of
    this process see.
    """
    process = process_of(request)
    if request.method in ("GET", "HEAD"):
        fresh = "no-cache" in request.headers.get("cache-control", "")
        return await process.shared_reads.read(work, fresh, *args, **kwargs)
    acting = asyncio.create_task(asyncio.to_thread(work, process.sync_client, *args, **kwargs))

    def acted(task: asyncio.Task[T]) -> None:
        # Also where it failed, or the client left: it may have changed something all the same.
        process.shared_reads.forget()
        if not task.cancelled():
            task.exception()  # the client that left does not take it

    acting.add_done_callback(acted)
    return await asyncio.shield(acting)


async def body_of(request: Http, kind: type[T]) -> T:
    """The request's body, decoded strictly. Raises RequestError naming the field at fault."""
    identity = identity_of(request)
    async with process_of(request).bodies.reading(request, OPERATOR_BYTES, identity.account) as body:
        return decode_body(body, kind)
