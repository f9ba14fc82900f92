"""/health (this process), /ready (the farm behind it) and /metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get

from api.routes.generation import process_of
from control.errors import RedisUnavailable

Http = Request[Any, Any, Any]


@get("/health")
async def health(request: Http) -> dict[str, str]:
    """200 as long as this process answers at all."""
    return {"status": "draining" if process_of(request).draining else "ok"}


@get("/ready")
async def ready(request: Http) -> Response[bytes]:
    """200 only if Redis answers now and at least one model can take a token's worth of work; says why otherwise."""
    process = process_of(request)
    reason = "this process is shutting down" if process.draining else None
    try:
        await process.models.look()
    except RedisUnavailable as error:
        reason = str(error)
    models = [
        {"id": overview.model, "state": overview.state, "detail": overview.detail}
        for overview in process.models.overviews
    ]
    if reason is None and not models:
        reason = "no model is loaded: furrow models load MODEL"
    if reason is None and not any(model["state"] == "loaded" for model in models):
        reason = "no model is ready: " + ", ".join(f"{model['id']} is {model['state']}" for model in models)
    body = {"ready": reason is None, "reason": reason, "models": models}
    status = 200 if reason is None else 503
    headers = {} if reason is None else {"retry-after": "1"}
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


@get("/metrics", media_type="text/plain; version=0.0.4")
async def metrics(request: Http) -> str:
    """Counters of this process for Prometheus."""
    process = process_of(request)
    return process.metrics.render(process.follower.open_feeds)
