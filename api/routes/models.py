"""GET /v1/models and /v1/models/<id>."""

from __future__ import annotations

from litestar import get
from litestar.params import FromPath

from api.access.headers import moment
from api.routes.generation import Http, identity_of, process_of
from api.schemas.state import ModelCard, ModelList
from control.errors import ModelNotFound


@get("/v1/models")
async def list_models(request: Http) -> ModelList:
    """Every model name that the caller may use, as last seen."""
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
async def retrieve_model(request: Http, model: FromPath[str]) -> ModelCard:
    """One model; ids may contain slashes."""
    identity = identity_of(request)
    models, name = process_of(request).models, model.removeprefix("/")
    if models.overview(name) is None:
        await models.look()
    if models.overview(name) is None or not identity.may_use(name, models.real_name(name)):
        raise ModelNotFound(name, models.names)
    return _card(request, name)


def _card(request: Http, name: str) -> ModelCard:
    models = process_of(request).models
    assets, overview = models.assets(name), models.overview(name)
    created = assets.created if assets is not None else 0
    context = assets.context_length if assets is not None else None
    card = ModelCard(
        id=name,
        display_name=name,
        created=created,
        created_at=moment(created),
        max_model_len=context,
        max_input_tokens=context,
    )
    if assets is not None:
        card.kind = assets.kind
        card.dimensions = assets.pooling.dimensions if assets.pooling is not None and assets.kind == "embed" else None
    if overview is not None:
        card.state, card.detail, card.revision = overview.state, overview.detail or None, overview.revision
        card.replicas, card.rolled_out = overview.wanted, overview.rolled_out
    return card
