"""How an operator's route reaches the farm: in a thread, because it reads a lot and streams must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from litestar import Request

from api.routes.generation import process_of
from api.schemas.decoding import decode_body
from control.clients import SyncRedis

Http = Request[Any, Any, Any]
P = ParamSpec("P")
T = TypeVar("T")


async def on_farm(request: Http, work: Callable[Concatenate[SyncRedis, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(client, …)`, whose errors are the response's."""
    return await asyncio.to_thread(work, process_of(request).sync_client, *args, **kwargs)


async def body_of(request: Http, kind: type[T]) -> T:
    """The request's body, decoded strictly. Raises RequestError naming the field at fault."""
    return decode_body(await request.body(), kind)
