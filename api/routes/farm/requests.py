"""/farm/requests and /farm/dead: the requests of all tenants, those that wait, run or have ended, dead letters, and the
texts of both.
"""

from __future__ import annotations

import asyncio
import uuid

from litestar import get, post
from litestar.params import FromPath, FromQuery

from api.chat.tokens import Vocabulary
from api.http.errors import Forbidden
from api.routes.farm.threaded import Http, body_of, on_farm
from api.routes.generation import process_of
from api.schemas.bodies import taking
from api.schemas.farm import (
    AnswerText,
    Done,
    EndedRequests,
    Letter,
    LetterNamed,
    Letters,
    LetterText,
    RequestNamed,
    Requests,
    RequestText,
    letter_card,
)
from control import requests
from control.errors import ModelUnavailable
from control.messages import GenerationRequest, LogEntry
from control.records import catalog
from control.records.api_reports import ended
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.requests import OpenRequest
from control.requests.upkeep.running import RequestLife, bare_id, find, life_of

_MOST = 1_000


@get("/requests")
async def list_requests(
    request: Http, model: FromQuery[str | None] = None, tenant: FromQuery[str | None] = None
) -> Requests:
    """The oldest 1,000 requests that wait or run, oldest first, of all models and tenants or of one."""
    return Requests(data=await on_farm(request, _open, model, tenant))


def _open(client: SyncRedis, model: str | None, tenant: str | None) -> list[OpenRequest]:
    return requests.open_requests(client, catalog.model_names(client, model), _MOST, tenant)


@get("/requests/ended")
async def list_ended(
    request: Http,
    model: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    failed: FromQuery[bool | None] = None,
) -> EndedRequests:
    """The newest 1,000 requests that ended in the last hour, as API processes saw them, of all models and tenants or of
    one; those that failed, or did not."""
    return EndedRequests(data=await on_farm(request, ended, _MOST, model, tenant, failed))


@get("/requests/{rid:str}")
async def show_life(request: Http, rid: FromPath[str]) -> RequestLife:
    """The phases of one request, the epochs that had it and the faults that it met; until two minutes after its end."""
    return await on_farm(request, _life, rid)


def _life(client: SyncRedis, rid: str) -> RequestLife:
    return life_of(client, catalog.model_names(client), rid)


@post("/requests/cancel", status_code=200, operation_class=taking(RequestNamed))
async def cancel_request(request: Http) -> Done:
    """End a request of any tenant: at once while it waits, with its next step while it runs."""
    rid = (await body_of(request, RequestNamed)).id
    return await on_farm(request, _cancel, rid)


def _cancel(client: SyncRedis, rid: str) -> Done:
    state = requests.cancel_any(client, catalog.model_names(client), rid)
    words = "ends with its next step" if state == "running" else f"is {state}"
    return Done(done=f"{rid}: {words}.", id=rid)


@get("/dead")
async def list_letters(request: Http, model: FromQuery[str | None] = None) -> Letters:
    """Every dead letter, newest first: of all models, or of one."""
    return Letters(data=await on_farm(request, _letters, model))


def _letters(client: SyncRedis, model: str | None) -> list[Letter]:
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
    body = await body_of(request, LetterNamed)
    new_id = await on_farm(request, _retry, body)
    return Done(done=f"{body.id} is tried again as {new_id}.", id=new_id)


def _retry(client: SyncRedis, body: LetterNamed) -> str:
    letter = requests.dead_letter(client, body.model, body.id)
    return requests.retry_letter(client, body.model, letter, uuid.uuid4().hex)


@post("/dead/drop", status_code=200, operation_class=taking(LetterNamed))
async def drop_letter(request: Http) -> Done:
    """Forget a dead letter."""
    body = await body_of(request, LetterNamed)
    await on_farm(request, _drop, body)
    return Done(done=f"{body.id} is dropped.", id=body.id)


def _drop(client: SyncRedis, body: LetterNamed) -> None:
    run(client, requests.drop_letter(body.model, requests.dead_letter(client, body.model, body.id)))


@get("/requests/{rid:str}/text")
async def show_text(request: Http, rid: FromPath[str]) -> RequestText:
    """The prompt and the answers of a request as far as they are written."""
    check_text_allowed(request)
    model, params, entries = await on_farm(request, _read, bare_id(rid))
    vocabulary = await _vocabulary(request, model)
    prompt = None if params is None else await asyncio.to_thread(vocabulary.decode_all, params.prompt)
    answers = await asyncio.to_thread(_answers, vocabulary, entries)
    return RequestText(id=bare_id(rid), model=model, prompt=prompt, answers=answers)


@get("/dead/{rid:str}/text")
async def show_letter_text(request: Http, rid: FromPath[str], model: FromQuery[str]) -> LetterText:
    """The prompt and all parameters of a dead letter: enough to reproduce the crash elsewhere."""
    check_text_allowed(request)
    letter = await on_farm(request, requests.dead_letter, model, rid)
    try:
        vocabulary = await _vocabulary(request, model)
    except ModelUnavailable:
        prompt = None
    else:
        prompt = await asyncio.to_thread(vocabulary.decode_all, letter.params.prompt)
    return LetterText(letter=letter_card(model, letter), params=letter.params, prompt=prompt)


def check_text_allowed(request: Http) -> None:
    """Raises Forbidden where prompts and answers are not shown to operators."""
    if not process_of(request).settings.console_text:
        text = (
            "Prompts and answers are not shown. Start this API process with --console-text (`furrow api` or "
            "`furrow serve`) to show those of all tenants to operators."
        )
        raise Forbidden(text, code="text_not_shown")


def _read(client: SyncRedis, rid: str) -> tuple[str, GenerationRequest | None, list[LogEntry]]:
    """The model, the parameters while they are kept, and the token log."""
    model, _ = find(client, catalog.model_names(client), rid, ("state",))
    params = run(client, requests.read_params(model, rid))
    return model, params, [entry for page in requests.read_pages(client, model, rid) for entry in page]


async def _vocabulary(request: Http, model: str) -> Vocabulary:
    """Raises ModelUnavailable for a model that was never loaded."""
    for served in await process_of(request).models.all_served():
        if served.name == model:
            return served.vocabulary
    raise ModelUnavailable(model, "loading", "its tokenizer is not there yet; retry shortly")


def _answers(vocabulary: Vocabulary, entries: list[LogEntry]) -> list[AnswerText]:
    """The text of each choice, by number."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, LogEntry] = {}
    for entry in entries:
        ids = tokens.setdefault(entry.choice, [])
        if entry.token is not None:
            ids.append(entry.token)
        if entry.finish is not None:
            ends[entry.choice] = entry
    return [
        AnswerText(
            index=choice,
            text=vocabulary.decode_all(tokens[choice]),
            finish_reason=ends[choice].finish if choice in ends else None,
            cause=ends[choice].cause if choice in ends else None,
        )
        for choice in sorted(tokens)
    ]
