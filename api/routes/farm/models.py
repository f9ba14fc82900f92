"""/farm/models: the desired models, and their state."""

from __future__ import annotations

import msgspec
from litestar import get, post
from litestar.params import FromQuery

from api.routes.farm.threaded import Http, body_of, on_farm
from api.schemas.bodies import taking
from api.schemas.farm import Done, History, ModelNamed, Models, ModelToLoad, ModelToScale
from api.schemas.generation import check_number
from control.errors import RequestError, SettingsError
from control.messages import ModelSpec
from control.operations import desired
from control.operations.model_reports import ModelMemory, history, memory_of
from control.operations.spec import DTYPES, Scale, build_spec
from control.redis.clients import SyncRedis
from control.replicas import model_overviews
from control.settings import demo_model


@get("/models")
async def show_models(request: Http) -> Models:
    """Every model with its replicas: state, revision, host, devices, epoch, progress, and the cause of a failure."""
    return Models(data=await on_farm(request, model_overviews.overviews))


@get("/history")
async def show_history(request: Http, model: FromQuery[str]) -> History:
    """The latest epochs of a model's replicas with the time of each stage, and the faults that ended them."""
    return History(data=await on_farm(request, history, model))


@get("/models/spec")
async def show_spec(request: Http, model: FromQuery[str]) -> ModelSpec:
    """The desired state of one model: its source and settings."""
    return await on_farm(request, desired.find_spec, model)


@get("/models/memory")
async def show_memory(request: Http, model: FromQuery[str]) -> ModelMemory:
    """The memory that each rank of a replica needs, and that each host has left for them."""
    return await on_farm(request, memory_of, model)


@post("/models/load", status_code=200, operation_class=taking(ModelToLoad))
async def load_model(request: Http) -> Done:
    """Add a model to the desired state, or change its settings; agents do the rest."""
    return await on_farm(request, _load, await body_of(request, ModelToLoad))


def _load(client: SyncRedis, body: ModelToLoad) -> Done:
    for name in ("tp", "max_context", "kv_tokens", "drain_s", "target_wait_s", "idle_s"):
        if (value := getattr(body, name)) is not None:
            check_number(name, value)
    if body.dtype not in DTYPES:
        raise RequestError(f"'dtype' {body.dtype!r} is unknown; use one of {', '.join(DTYPES)}.", param="dtype")
    options = msgspec.structs.asdict(body)
    source = options.pop("source")
    replicas = options.pop("replicas")
    scale = None if replicas is None else _scale_of(replicas)
    spec = build_spec(source, demo=demo_model(), **options)
    outcome = desired.load(client, spec, scale)
    if not outcome.changed:
        words = f"has these settings already, as revision {outcome.revision}."
    elif outcome.before:
        words = f"its replicas change to revision {outcome.revision}, one by one."
    else:
        words = "loading…"
    return Done(done=f"{spec.name}: {words}", revision=outcome.revision)


@post("/models/reload", status_code=200, operation_class=taking(ModelNamed))
async def reload_model(request: Http) -> Done:
    """Restart a model's replicas one by one, for example after a change of its files."""
    name = (await body_of(request, ModelNamed)).model
    revision = await on_farm(request, desired.reload, name)
    return Done(done=f"{name}: its replicas are restarted one by one, as revision {revision}.", revision=revision)


@post("/models/scale", status_code=200, operation_class=taking(ModelToScale))
async def scale_model(request: Http) -> Done:
    """Run more or fewer replicas of a model."""
    body = await body_of(request, ModelToScale)
    scale = _scale_of(body.replicas)
    await on_farm(request, desired.scale, body.model, scale)
    return Done(done=f"{body.model}: {scale} replicas are desired.")


def _scale_of(replicas: int | str) -> Scale:
    """Raises RequestError for what is neither a number of replicas nor a range."""
    if isinstance(replicas, int):
        check_number("replicas", replicas)
    elif ".." not in replicas:
        raise RequestError(f"'replicas' {replicas!r} is neither a number nor a range such as '0..4'.", param="replicas")
    try:
        return Scale.of(replicas)
    except SettingsError as error:
        raise RequestError(str(error), param="replicas") from error


@post("/models/pause", status_code=200, operation_class=taking(ModelNamed))
async def pause_model(request: Http) -> Done:
    """Claim no more requests of a model: new ones wait in its queue, those that run are finished."""
    name = (await body_of(request, ModelNamed)).model
    changed = await on_farm(request, desired.pause, name, paused=True)
    return Done(done=f"{name}: {'paused' if changed else 'was paused already'}.")


@post("/models/resume", status_code=200, operation_class=taking(ModelNamed))
async def resume_model(request: Http) -> Done:
    """Claim the requests of a paused model again."""
    name = (await body_of(request, ModelNamed)).model
    changed = await on_farm(request, desired.pause, name, paused=False)
    return Done(done=f"{name}: {'resumed' if changed else 'was not paused'}.")


@post("/models/unload", status_code=200, operation_class=taking(ModelNamed))
async def unload_model(request: Http) -> Done:
    """Unload a model once its running requests have finished."""
    name = (await body_of(request, ModelNamed)).model
    await on_farm(request, desired.unload, name)
    return Done(done=f"{name}: unloading.")
