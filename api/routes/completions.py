"""POST /v1/chat/completions, /v1/completions and /infill; and stored chat completions: list, read, relabel, delete, and
list the messages of one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from api.generation.client_request import Caller
from api.generation.session import Session
from api.generation.stored_answers import kept_messages, stored_body
from api.http.errors import Forbidden
from api.http.gate import proxy_header
from api.http.turns import off_loop
from api.routes.generation import Http, ParsedBody, generate, identity_of, process_of, serve, text_of
from api.schemas.bodies import taking
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import CompletionRequest, parse_completion
from api.schemas.decoding import decode_request
from api.schemas.generation import check_labels, check_number
from api.schemas.llama_cpp import InfillRequest, parse_infill
from api.schemas.state import ChatList, ChatMessages, Deleted, page_of
from control.messages import encode
from control.records.responses import StoredResponse


@post("/v1/chat/completions", status_code=200, operation_class=taking(ChatRequest, open_ended=True))
async def create_chat_completion(request: Http) -> Response[Any]:
    """Answer a conversation, as one body or as server-sent events; with `store`, to be read again later."""
    process = process_of(request)

    async def read(body: bytes, caller: Caller) -> ParsedBody:
        chat = await off_loop(len(body), parse_chat, body, caller.warnings)
        if not chat.store:
            return ParsedBody(body=chat)
        if not process.archive.ttl_ms:
            caller.warnings.add("The completion is not stored: this server stores none.", "store")
            return ParsedBody(body=msgspec.structs.replace(chat, store=False))
        messages = await off_loop(len(body), kept_messages, caller.rid, chat.messages)
        process.archive.check_size(messages, chat.stored_fields(caller.rid) | {"metadata": chat.metadata})

        async def accepted(session: Session) -> None:
            stored = StoredResponse(
                rid=session.rid,
                owner=caller.identity.owner,
                tenant=caller.identity.tenant,
                model=session.feeds.model,
                view=session.renderer.view.encode(),
                input=messages,
                kind="chat",
                named=session.renderer.view.model,
                metadata=msgspec.json.encode(chat.metadata or {}).decode(),
                params=await off_loop(caller.body_bytes, _params_of, session),
            )
            await process.archive.accept(stored, caller.request_log.received_ms)

        return ParsedBody(body=chat, accepted=accepted)

    return await serve(request, read)


def _params_of(session: Session) -> bytes:
    """The parameters of a chat, by which it can be replayed; none where pixels belong to them, which are not kept, or
    where another process enqueued it."""
    origin = session.feeds.members[0].origin
    return b"" if origin is None or origin.params.images else encode(origin.params)


@post("/v1/completions", status_code=200, operation_class=taking(CompletionRequest, open_ended=True))
async def create_completion(request: Http) -> Response[Any]:
    """Continue one or several prompts, as one body or as server-sent events."""
    return await generate(request, parse_completion)


@post("/infill", status_code=200, operation_class=taking(InfillRequest, open_ended=True))
async def fill_gap(request: Http) -> Response[Any]:
    """Fill the gap between two texts, in llama.cpp's form, as one body or as server-sent events."""
    return await generate(request, parse_infill)


_LABEL = "metadata["


class Labels(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body that relabels a stored chat completion."""

    metadata: dict[str, str] | None


@get("/v1/chat/completions")
async def list_chat_completions(
    request: Http,
    after: FromQuery[str | None] = None,
    limit: FromQuery[int] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "asc",
    model: FromQuery[str | None] = None,
) -> ChatList:
    """The caller's stored chat completions by age; `metadata[key]=value` and `model` choose among them."""
    process = process_of(request)
    who = identity_of(request)
    check_number("limit", limit)
    if not who.account and (not who.admin or proxy_header(request.headers) is not None):
        raise Forbidden(
            "Without an API key the stored chat completions are listed on a server that listens on loopback only, and "
            "not through a proxy: all callers without a key would see them. Use a key made with `furrow keys create`."
        )
    page = await process.stored_chats.page(
        who, after=after, limit=limit, newest_first=order == "desc", model=model, labels=_labels(request)
    )
    ids = [msgspec.json.decode(body, type=_Identified).id for body in page.bodies[:1] + page.bodies[-1:]]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    if page.last:
        last = f"chatcmpl-{page.last}"
    data = [msgspec.Raw(body) for body in page.bodies]
    return ChatList(data=data, first_id=first, last_id=last, has_more=bool(page.last))


class _Identified(msgspec.Struct):
    id: str


@get("/v1/chat/completions/{completion_id:str}")
async def retrieve_chat_completion(request: Http, completion_id: FromPath[str]) -> Response[bytes]:
    """A stored chat completion, once it has ended."""
    process = process_of(request)
    who = identity_of(request)
    return _json(stored_body(await process.stored_chats.look_up(completion_id, who)))


@post("/v1/chat/completions/{completion_id:str}", status_code=200, operation_class=taking(Labels))
async def relabel_chat_completion(request: Http, completion_id: FromPath[str]) -> Response[bytes]:
    """Replace the metadata of a stored chat completion."""
    process = process_of(request)
    who = identity_of(request)
    async with text_of(request) as body:
        labels = decode_request(body, Labels, None).metadata or {}
    check_labels(labels)
    stored = await process.stored_chats.look_up(completion_id, who)
    await process.stored_chats.relabel(stored, labels)
    return _json(stored_body(await process.stored_chats.look_up(completion_id, who)))


@delete("/v1/chat/completions/{completion_id:str}", status_code=200)
async def delete_chat_completion(request: Http, completion_id: FromPath[str]) -> Deleted:
    """Delete a stored chat completion."""
    process = process_of(request)
    who = identity_of(request)
    await process.stored_chats.drop(await process.stored_chats.look_up(completion_id, who))
    return Deleted(id=completion_id, object="chat.completion.deleted")


@get("/v1/chat/completions/{completion_id:str}/messages")
async def list_chat_messages(
    request: Http,
    completion_id: FromPath[str],
    after: FromQuery[str | None] = None,
    limit: FromQuery[int] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "asc",
) -> ChatMessages:
    """The messages of a stored chat completion's request."""
    process = process_of(request)
    who = identity_of(request)
    stored = await process.stored_chats.look_up(completion_id, who)
    return page_of(ChatMessages, stored.input, order, after, limit)


def _labels(request: Request[Any, Any, Any]) -> dict[str, str]:
    """The filters `metadata[key]=value` of the query."""
    query = request.query_params.multi_items()
    return {name[len(_LABEL) : -1]: value for name, value in query if name.startswith(_LABEL) and name.endswith("]")}


def _json(body: bytes) -> Response[bytes]:
    return Response(body, status_code=200, media_type="application/json")
