"""POST /v1/chat/completions, /v1/completions and /infill."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, post

from api.generation.client_request import Caller
from api.generation.session import Session
from api.generation.stored_answers import kept_messages
from api.http.turns import off_loop
from api.routes.generation import Http, ParsedBody, generate, process_of, serve
from api.schemas.bodies import taking
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import CompletionRequest, parse_completion
from api.schemas.llama_cpp import InfillRequest, parse_infill
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
