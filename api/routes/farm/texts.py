"""Prompts and answers of all tenants, for operators: only where the process was started with --console-text."""

from __future__ import annotations

import asyncio

from litestar import get
from litestar.params import FromPath, FromQuery

from api.chat.tokens import Vocabulary
from api.http.errors import Forbidden
from api.routes.farm.letters import letter_card
from api.routes.farm.threaded import Http, on_farm
from api.routes.generation import process_of
from api.schemas.farm import AnswerText, LetterText, RequestText
from control import requests
from control.errors import ModelUnavailable
from control.messages import GenerationRequest, LogEntry
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.requests.upkeep.running import bare_id, find


@get("/requests/{rid:str}/text")
async def show_text(request: Http, rid: FromPath[str]) -> RequestText:
    """The prompt and the answers of a request as far as they are written."""
    check_shown(request)
    model, params, entries = await on_farm(request, _read, bare_id(rid))
    vocabulary = await _vocabulary(request, model)
    prompt = None if params is None else await asyncio.to_thread(vocabulary.decode_all, params.prompt)
    answers = await asyncio.to_thread(_answers, vocabulary, entries)
    return RequestText(id=bare_id(rid), model=model, prompt=prompt, answers=answers)


@get("/dead/{rid:str}/text")
async def show_letter_text(request: Http, rid: FromPath[str], model: FromQuery[str]) -> LetterText:
    """The prompt and all parameters of a dead letter: enough to reproduce the crash elsewhere."""
    check_shown(request)
    letter = await on_farm(request, requests.dead_letter, model, rid)
    try:
        vocabulary = await _vocabulary(request, model)
    except ModelUnavailable:
        prompt = None
    else:
        prompt = await asyncio.to_thread(vocabulary.decode_all, letter.params.prompt)
    return LetterText(letter=letter_card(model, letter), params=letter.params, prompt=prompt)


def check_shown(request: Http) -> None:
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
