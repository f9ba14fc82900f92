"""GET /v1/models and /v1/models/<id>."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromPath

from api.routes.generation import authenticate, process_of
from api.schemas.state import ModelCard, ModelList
from control.errors import ModelNotFound


@get("/v1/models")
async def list_models(request: Request[Any, Any, Any]) -> ModelList:
    """Every name that may be asked for. Never waits for inference: it reads what was last seen of the farm."""
    authenticate(request)
    models = process_of(request).models
    if not models.seen:
        await models.look()
    return ModelList(data=[_card(request, name) for name in models.names])


@get("/v1/models/{model:path}")
async def retrieve_model(request: Request[Any, Any, Any], model: FromPath[str]) -> ModelCard:
    """One model; ids may contain slashes."""
    authenticate(request)
    models, name = process_of(request).models, model.removeprefix("/")
    if not models.knows(name):
        await models.look()
    if not models.knows(name):
        raise ModelNotFound(name, models.names)
    return _card(request, name)


def _card(request: Request[Any, Any, Any], name: str) -> ModelCard:
    models = process_of(request).models
    assets, overview = models.assets(name), models.overview(name)
    return ModelCard(
        id=name,
        created=assets.created if assets is not None else 0,
        max_model_len=assets.context_length if assets is not None else None,
        state=overview.state if overview is not None else None,
        revision=overview.revision if overview is not None else None,
        replicas=overview.wanted if overview is not None else None,
        rolled_out=overview.rolled_out if overview is not None else None,
    )
