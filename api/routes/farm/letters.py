"""/farm/dead: dead letters, requests that crashed their group when they ran alone."""

from __future__ import annotations

import uuid

from litestar import get, post
from litestar.params import FromPath, FromQuery

from api.routes.farm.threaded import Http, body_of, on_farm
from api.schemas.bodies import taking
from api.schemas.farm import Done, Letter, LetterNamed, Letters, letter_card
from control import requests
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run


@get("/dead")
async def list_letters(request: Http, model: FromQuery[str | None] = None) -> Letters:
    """Every dead letter, newest first: of all models, or of one."""
    return Letters(data=await on_farm(request, _list, model))


def _list(client: SyncRedis, model: str | None) -> list[Letter]:
    models = [model] if model is not None else [spec.name for spec in catalog.list_specs(client)]
    cards = [letter_card(name, letter) for name in models for letter in run(client, requests.dead_letters(name))]
    return sorted(cards, key=lambda letter: -letter.at_ms)


@get("/dead/{rid:str}")
async def show_letter(request: Http, rid: FromPath[str], model: FromQuery[str]) -> Letter:
    """One dead letter, without its prompt."""
    return letter_card(model, await on_farm(request, requests.dead_letter, model, rid))


@post("/dead/retry", status_code=200, operation_class=taking(LetterNamed))
async def retry_letter(request: Http) -> Done:
    """Enqueue the request again under a new id, and drop its letter."""
    named = await body_of(request, LetterNamed)
    again = await on_farm(request, _retry, named)
    return Done(done=f"{named.id} is tried again as {again}.", id=again)


def _retry(client: SyncRedis, named: LetterNamed) -> str:
    letter = requests.dead_letter(client, named.model, named.id)
    return requests.retry_letter(client, named.model, letter, uuid.uuid4().hex)


@post("/dead/drop", status_code=200, operation_class=taking(LetterNamed))
async def drop_letter(request: Http) -> Done:
    """Forget a dead letter."""
    named = await body_of(request, LetterNamed)
    await on_farm(request, _drop, named)
    return Done(done=f"{named.id} is dropped.", id=named.id)


def _drop(client: SyncRedis, named: LetterNamed) -> None:
    run(client, requests.drop_letter(named.model, requests.dead_letter(client, named.model, named.id)))
