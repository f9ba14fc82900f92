"""/health and /ping (this process), /health/stream (the way to it), /ready (the farm), /metrics, /version and /load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from litestar import Response, get
from litestar.openapi import ResponseSpec
from litestar.response import Stream

from api.generation.session import STREAM_HEADERS
from api.process import Process
from api.routes.generation import Http, process_of
from api.schemas.answers import encode
from api.schemas.state import Health, ModelState, Readiness, RedisMemory, ServerLoad, Version
from control.clock import now_ms
from control.errors import RedisUnavailable, state_in_words
from control.version import VERSION


@get(["/health", "/ping"])
async def health(request: Http) -> Health:
    """200 while this process runs."""
    return Health("draining" if process_of(request).shutdown.draining else "ok")


PROBE_EVENTS = 5
PROBE_PAUSE_S = 0.2


@get("/health/stream", responses={200: ResponseSpec(str, media_type="text/event-stream", generate_examples=False)})
async def stream_probe() -> Stream:
    """Five server-sent events within a second, as an answer is streamed; no model works for it. Where they come all at
    once, something between client and server holds streams back."""
    return Stream(_probe_events(), headers=STREAM_HEADERS)


async def _probe_events() -> AsyncIterator[bytes]:
    for number in range(1, PROBE_EVENTS + 1):
        yield b'event: probe\ndata: {"number":%d,"of":%d,"at_ms":%d}\n\n' % (number, PROBE_EVENTS, now_ms())
        if number < PROBE_EVENTS:
            await asyncio.sleep(PROBE_PAUSE_S)


@get("/version")
async def version() -> Version:
    """The version of this server."""
    return Version(version=VERSION)


@get("/load")
async def load(request: Http) -> ServerLoad:
    """The answers that this process follows now, in vLLM's form; those of the farm are in /farm/requests."""
    return ServerLoad(server_load=process_of(request).follower.open_feeds)


@get("/ready")
async def ready(request: Http) -> Response[bytes]:
    """200 if Redis answers and a model has made a token in the last five seconds, or makes one now; else 503."""
    process = process_of(request)
    try:
        if process.shutdown.draining:
            reason = "this process is shutting down"
        else:
            await process.models.look()
            reason = await _obstacle(process)
    except RedisUnavailable as error:
        reason = str(error)
    models = [
        ModelState(overview.model, overview.state, overview.paused, overview.detail)
        for overview in process.models.overviews
    ]
    redis = [RedisMemory(server.used, server.most) for server in process.completion.servers]
    body = encode(Readiness(reason is None, reason, models, redis))
    status = 200 if reason is None else 503
    headers = {} if reason is None else {"retry-after": "1"}
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def _obstacle(process: Process) -> str | None:
    """The reason why no model can serve; None if one can, or sleeps, or is paused and takes requests into its queue."""
    overviews = process.models.overviews
    if not overviews:
        return "no model is loaded: furrow models load MODEL"
    loaded = [overview.model for overview in overviews if overview.state == "loaded"]
    if not loaded and any(overview.state == "sleeping" for overview in overviews):
        return None
    if not loaded:
        return "no model is ready: " + "; ".join(
            f"{overview.model} {state_in_words(overview.state)}{f': {overview.detail}' if overview.detail else ''}"
            for overview in overviews
        )
    if any(overview.paused for overview in overviews if overview.state == "loaded"):
        return None
    results = [
        await process.canary.check(served) for served in await process.models.all_served() if served.name in loaded
    ]
    if not results:
        return "no tokenizer is there yet"
    return None if None in results else "; ".join(f"{reason}" for reason in results)


@get("/metrics", media_type="text/plain; version=0.0.4")
async def metrics(request: Http) -> str:
    """Counters of this process for Prometheus."""
    process = process_of(request)
    return process.metrics.render(process.follower.open_feeds, process.completion.servers)
