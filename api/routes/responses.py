"""/v1/responses: create, read, stream, cancel, delete, and list the input."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery
from msgspec import structs

from api.generation.client_request import Caller, count_tokens
from api.generation.context import fitted
from api.generation.session import Session
from api.http.gate import Identity
from api.http.turns import off_loop
from api.models.models import ServedModel
from api.process import Process
from api.routes.generation import (
    Http,
    ParsedBody,
    authenticate,
    caller_of,
    finish_headers,
    identity_of,
    model_for,
    process_of,
    refused,
    serve,
    streamed,
    text_of,
)
from api.schemas.answers import encode
from api.schemas.bodies import taking
from api.schemas.converted import Converted
from api.schemas.decoding import missing
from api.schemas.generation import check_number
from api.schemas.items import Item, has_images, read_items, trigger
from api.schemas.response_answers import StoredOutput
from api.schemas.response_tools import unenforced
from api.schemas.responses import (
    ResponseRequest,
    is_compaction,
    kept_messages,
    parse_response,
    since_compaction,
    summarising,
    with_summaries,
)
from api.schemas.state import Deleted, InputItems, InputTokens, page_of
from api.schemas.view import COMPACTION, StreamCursor
from control.errors import RequestError, RequestNotFound
from control.records.responses import StoredResponse

_PARAM = "previous_response_id"


@post("/v1/responses", status_code=200, operation_class=taking(ResponseRequest, open_ended=True))
async def create_response(request: Http) -> Response[Any]:
    """Answer a conversation of items, as one body, as server-sent events, or in the background."""
    process = process_of(request)

    async def read(body: bytes, caller: Caller) -> ParsedBody:
        parsed = await off_loop(len(body), parse_response, body, caller.warnings)
        stored = parsed.store is not False and process.archive.ttl_ms > 0
        if parsed.background and not stored:
            raise RequestError(
                "'background' needs responses to be stored; this server stores none.", param="background"
            )
        own, previous, items = await _conversation(process, parsed, caller)
        if stored and parsed.store is None and not parsed.background and has_images(own):
            stored = process.archive.takes(own)
            if not stored:
                caller.warnings.add(
                    "The response is not stored: the images of 'input' are too large for it. Send 'store': false, or "
                    "smaller images.",
                    "store",
                )

        async def accepted(session: Session) -> Response[Any] | None:
            if stored:
                await process.archive.accept(_record(session, caller.identity, previous, own))
            if not parsed.background or parsed.stream:
                return None
            response = _json(encode(session.renderer.so_far("queued")), session.rid)
            process.completion.follow(session)
            return response

        served = await model_for(request, parsed.model)
        for text, param in await off_loop(8 * len(body), unenforced, parsed.tools or [], served.forms.writes_text):
            caller.warnings.add(text, param)
        chat = await _chat(parsed, items, served, caller, stored=stored)
        if stored:
            process.archive.check_size(own, chat.extra_fields)
        return ParsedBody(body=chat, accepted=accepted if stored else None)

    return await serve(request, read)


async def _chat(
    parsed: ResponseRequest, items: list[Item], served: ServedModel, caller: Caller, *, stored: bool
) -> Converted:
    """The chat request for the conversation, or for its summary if that was requested."""
    if is_compaction(items):
        parsed = summarising(parsed, served.assets.context_length)
    chat = await fitted(parsed, since_compaction(items), served, caller.body_bytes, caller.images, stored=stored)
    # Images of this request have its items' places for names, those of stored responses their items' ids.
    own = re.compile(rf"^\w+_{caller.rid}_in(\d+)\.")
    return structs.replace(chat, names={ours: own.sub(r"input[\1].", name) for ours, name in chat.names.items()})


def _record(session: Session, who: Identity, previous: str, own: list[Item]) -> StoredResponse:
    return StoredResponse(
        rid=session.rid,
        owner=who.owner,
        tenant=who.tenant,
        model=session.feeds.model,
        view=session.renderer.view.encode(),
        previous=previous,
        input=own,
    )


async def _conversation(
    process: Process, parsed: ResponseRequest, caller: Caller
) -> tuple[list[Item], str, list[Item]]:
    """The request's own items, the rid of the response that it continues, and the items of the whole conversation."""
    who = caller.identity
    sealed = isinstance(parsed.input, list) and any("encrypted_content" in row for row in parsed.input)
    unseal = await process.seals.opener(who.tenant) if sealed else None
    new_items = await off_loop(caller.body_bytes, read_items, parsed.input, caller.rid, caller.warnings, unseal)
    own = [await _resolved(process, item, who) for item in new_items]
    if parsed.previous_response_id is None:
        return own, "", own
    last = await process.archive.look_up(parsed.previous_response_id, who, _PARAM)
    items: list[Item] = []
    for stored in await process.archive.chain(last, _PARAM):
        response = msgspec.json.decode(await process.stored_answers.current(stored), type=StoredOutput)
        if response.status in ("queued", "in_progress"):
            raise RequestError(f"Response '{response.id}' has not ended yet; wait for it.", param=_PARAM)
        output = response.output
        if any(item["type"] == "compaction" for item in output):
            output = with_summaries(output, await process.seals.opener(who.tenant))
        items += [*stored.input, *output]
        await asyncio.sleep(0)  # each may be large, and other streams must not wait for all of them
    return own, last.rid, [*items, *own]


async def _resolved(process: Process, item: Item, who: Identity) -> Item:
    """The item itself where it only refers to a stored one. Raises RequestNotFound."""
    if item["type"] != "item_reference":
        return item
    stored = await process.archive.find(item["id"], who)
    if stored is not None:
        response = msgspec.json.decode(await process.stored_answers.current(stored), type=StoredOutput)
        for candidate in [*stored.input, *response.output]:
            if candidate["id"] == item["id"]:
                return candidate
    raise RequestNotFound(f"Item with id '{item['id']}' not found.", param="input", code="item_not_found")


@post("/v1/responses/input_tokens", status_code=200, operation_class=taking(ResponseRequest, open_ended=True))
async def count_input_tokens(request: Http) -> Response[InputTokens]:
    """Count the tokens of the prompt that the same body has."""
    caller = caller_of(request)
    process = process_of(request)
    tenant = authenticate(request)
    async with text_of(request) as body:
        caller = caller.identified(tenant, body)
        parsed = await off_loop(len(body), parse_response, body, caller.warnings)
        _, _, items = await _conversation(process, parsed, caller)
        served = await model_for(request, parsed.model)
        chat = await _chat(parsed, items, served, caller, stored=False)
        response = Response(InputTokens(input_tokens=await count_tokens(chat, served, len(body), caller.images)))
        finish_headers(response, caller)
        return response


@post("/v1/responses/compact", status_code=200, operation_class=taking(ResponseRequest, open_ended=True))
async def compact_response(request: Http) -> Response[Any]:
    """Have the model summarise a conversation; its input may go on from the answer's output."""
    process = process_of(request)

    async def read(body: bytes, caller: Caller) -> ParsedBody:
        parsed = await off_loop(len(body), parse_response, body, caller.warnings)
        if not parsed.model:
            raise missing("model")
        _, _, items = await _conversation(process, parsed, caller)
        served = await model_for(request, parsed.model)
        parsed = structs.replace(parsed, stream=None, background=None)
        chat = await _chat(parsed, [*items, trigger(f"cmt_{caller.rid}")], served, caller, stored=False)
        chat.extra_fields[COMPACTION] = kept_messages(items)
        return ParsedBody(body=chat)

    return await serve(request, read)


@get("/v1/responses/{response_id:str}")
async def retrieve_response(
    request: Http,
    response_id: FromPath[str],
    stream: FromQuery[bool | None] = None,
    starting_after: FromQuery[int | None] = None,
) -> Response[Any]:
    """A stored response in its current state; or its events, from the beginning or after one of them."""
    process = process_of(request)
    caller = caller_of(request)
    session = None
    caller = caller.identified(authenticate(request))
    try:
        if starting_after is not None:
            check_number("starting_after", starting_after)
        stored = await process.archive.look_up(response_id, caller.identity)
        if not stream:
            return _json(stored.response or await process.stored_answers.current(stored), stored.rid)
        process.shutdown.refuse_when_draining()
        session = await process.sessions.resume(StreamCursor(stored.rid, []), caller, stored.model)
        session.renderer.starting_after = -1 if starting_after is None else starting_after
        await session.settle()
        return streamed(session, caller)
    except RequestNotFound as error:
        if stream and error.code != "response_not_found":
            error = RequestNotFound(
                f"The events of '{response_id}' are gone; read the response without 'stream'.",
                param="stream",
                code="stream_expired",
            )
        return refused(error, caller, session)
    except Exception as error:
        return refused(error, caller, session)


@delete("/v1/responses/{response_id:str}", status_code=200)
async def delete_response(request: Http, response_id: FromPath[str]) -> Deleted:
    """Delete a response; a running one is cancelled."""
    process = process_of(request)
    who = identity_of(request)
    stored = await process.archive.look_up(response_id, who)
    if stored.response is None:
        await process.stored_answers.cancel(stored)
    await process.archive.drop(stored.rid, stored.owner)
    return Deleted(id=response_id)


@post("/v1/responses/{response_id:str}/cancel", status_code=200)
async def cancel_response(request: Http, response_id: FromPath[str]) -> Response[Any]:
    """Cancel a response; an ended one is unchanged."""
    process = process_of(request)
    who = identity_of(request)
    stored = await process.archive.look_up(response_id, who)
    return _json(await process.stored_answers.cancelled(stored), stored.rid)


@get("/v1/responses/{response_id:str}/input_items")
async def list_input_items(
    request: Http,
    response_id: FromPath[str],
    limit: FromQuery[int] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "desc",
    after: FromQuery[str | None] = None,
) -> InputItems:
    """The input items of this request, without those of the responses that it continues."""
    process = process_of(request)
    who = identity_of(request)
    stored = await process.archive.look_up(response_id, who)
    return page_of(InputItems, stored.input, order, after, limit)


def _json(body: bytes, rid: str) -> Response[bytes]:
    return Response(body, status_code=200, media_type="application/json", headers={"x-request-id": rid})
