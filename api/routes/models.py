"""GET /v1/models and /v1/models/<id>."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromPath

from api.access.headers import moment
from api.routes.generation import identity_of, process_of
from api.schemas.state import ModelCard, ModelList
from control.errors import ModelNotFound


@get("/v1/models")
async def list_models(request: Request[Any, Any, Any]) -> ModelList:
    """Every name that may be asked for. Never waits for inference: it reads what was last seen of the farm."""
    identity, models = identity_of(request), process_of(request).models
    if not models.seen:
        await models.look()
    names = [name for name in models.names if identity.may_use(name, models.real_name(name))]
    return ModelList(
        data=[_card(request, name) for name in names],
        first_id=names[0] if names else None,
        last_id=names[-1] if names else None,
    )


@get("/v1/models/{model:path}")
async def retrieve_model(request: Request[Any, Any, Any], model: FromPath[str]) -> ModelCard:
    """One model; ids may contain slashes."""
    identity = identity_of(request)
    models, name = process_of(request).models, model.removeprefix("/")
    if not models.knows(name):
        await models.look()
    if not models.knows(name) or not identity.may_use(name, models.real_name(name)):
        raise ModelNotFound(name, models.names)
    return _card(request, name)


def _card(request: Request[Any, Any, Any], name: str) -> ModelCard:
    models = process_of(request).models
    assets, overview = models.assets(name), models.overview(name)
    created = assets.created if assets is not None else 0
    context = assets.context_length if assets is not None else None
    return ModelCard(
        id=name,
        display_name=name,
        created=created,
        created_at=moment(created),
        max_model_len=context,
        max_input_tokens=context,
        state=overview.state if overview is not None else None,
        detail=(overview.detail or None) if overview is not None else None,
        revision=overview.revision if overview is not None else None,
        replicas=overview.wanted if overview is not None else None,
        rolled_out=overview.rolled_out if overview is not None else None,
    )
