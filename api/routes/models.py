"""GET /v1/models and /v1/models/<id>, and for operators DELETE of one."""

from __future__ import annotations

from collections import Counter

from litestar import delete, get
from litestar.params import FromPath

from api.http.gate import check_operator
from api.http.limits import moment
from api.routes.farm.threaded import on_farm
from api.routes.generation import Http, identity_of, process_of
from api.schemas.state import Deleted, ModelBackend, ModelCard, ModelList
from control.engines import adapter_in
from control.errors import ModelNotFound
from control.operations import desired
from control.replicas.model_overviews import Overview


@get("/v1/models")
async def list_models(request: Http) -> ModelList:
    """Every model name that the caller may use, as last seen."""
    identity = identity_of(request)
    models = process_of(request).models
    if not models.reachable:
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
    return _card(request, await _name_in_path(request, model))


@delete("/v1/models/{model:path}", status_code=200)
async def delete_model(request: Http, model: FromPath[str]) -> Deleted:
    """Unload a model, for operators, once its running requests have finished. Its files stay on the hosts."""
    name = await _name_in_path(request, model)
    await check_operator(request)
    await on_farm(request, desired.unload, process_of(request).models.real_name(name))
    return Deleted(id=name, object="model")


async def _name_in_path(request: Http, model: str) -> str:
    """The name in a path. Raises ModelNotFound for a model that the caller may not use either."""
    identity = identity_of(request)
    models = process_of(request).models
    name = model.removeprefix("/")
    if models.overview(name) is None:
        await models.look()
    if models.overview(name) is None or not identity.may_use(name, models.real_name(name)):
        raise ModelNotFound(
            name, [usable for usable in models.names if identity.may_use(usable, models.real_name(usable))]
        )
    return name


def _backends(overview: Overview) -> list[ModelBackend]:
    """The distinct backends of the replicas, the most frequent one first."""
    counts = Counter(replica.backend.fingerprint for replica in overview.replicas if replica.backend is not None)
    backends = {
        replica.backend.fingerprint: replica.backend for replica in overview.replicas if replica.backend is not None
    }
    return [
        ModelBackend(
            system_fingerprint=fingerprint,
            replicas=count,
            weights=(backend := backends[fingerprint]).weights,
            dtype=backend.dtype,
            kv_type=backend.kv_type or None,
            quant=backend.quant,
            dequantize=backend.dequantize,
            tp=backend.tp,
            collective=backend.collective or None,
            kernels=backend.kernels,
            batch_invariant=backend.batch_invariant,
        )
        for fingerprint, count in counts.most_common()
    ]


def _card(request: Http, name: str) -> ModelCard:
    models = process_of(request).models
    assets = models.assets(name)
    overview = models.overview(name)
    # Of a model that sleeps the assets may not have been read yet.
    created = overview.created if overview is not None else 0
    context = overview.context_length if overview is not None else None
    card = ModelCard(
        id=name,
        display_name=name,
        created=created,
        created_at=moment(created),
        max_model_len=context,
        max_input_tokens=context,
    )
    if assets is not None:
        card.parent = models.real_name(name) if adapter_in(name, assets.adapters) else None
        card.kind = assets.kind
        card.dimensions = assets.pooling.dimensions if assets.pooling is not None and assets.kind == "embed" else None
    if overview is not None:
        card.engine = overview.engine
        card.state = overview.state
        card.detail = overview.detail or None
        card.revision = overview.revision
        card.replicas = overview.wanted
        card.rolled_out = overview.rolled_out
        card.backends = _backends(overview)
        card.system_fingerprint = card.backends[0].system_fingerprint if len(card.backends) == 1 else None
    return card
