"""llama.cpp's own routes: /completion, /apply-template, /props, /slots and the count of a chat's tokens; /infill and
/embedding are beside their kin."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromQuery

from api.chat.template import special_tokens
from api.generation.client_request import generation_request, prompts_of, render_prompts, size_of
from api.http.turns import off_loop
from api.models.models import ServedModel
from api.routes.generation import (
    Http,
    authenticate,
    caller_of,
    finish_headers,
    generate,
    identity_of,
    model_for,
    process_of,
    text_of,
)
from api.schemas.bodies import taking
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.llama_cpp import (
    AppliedTemplate,
    GenerationDefaults,
    Modalities,
    NativeCompletion,
    NativeRequest,
    NextToken,
    Props,
    Slot,
    parse_native,
    settings_of,
)
from api.schemas.state import InputTokens
from control.redis.clients import SyncRedis
from control.requests import OpenRequest, open_requests
from control.version import VERSION

_NO_SEED = 2**32 - 1
"""llama.cpp's seed of requests that give none."""
_MOST_SLOTS = 256


@post("/completion", status_code=200, operation_class=taking(NativeRequest, open_ended=True))
async def complete(request: Http) -> Response[Any]:
    """Continue one or several prompts, in llama.cpp's form, as one body or as server-sent events."""
    return await generate(request, parse_native)


@post("/apply-template", status_code=200, operation_class=taking(ChatRequest, open_ended=True))
async def apply_template(request: Http) -> Response[AppliedTemplate]:
    """The prompt that the same body has as a chat, as text."""
    caller = caller_of(request)
    tenant = authenticate(request)
    async with text_of(request) as body:
        chat = await off_loop(len(body), parse_chat, body, caller.warnings)
        served = await model_for(request, chat.model)
        prompt = await served.run(max(len(body), size_of(chat)), tenant, render_prompts, chat)
        response = Response(AppliedTemplate(prompt=str(prompt.texts[0])))
        finish_headers(response, caller)
        return response


@post("/v1/chat/completions/input_tokens", status_code=200, operation_class=taking(ChatRequest, open_ended=True))
async def count_chat_tokens(request: Http) -> Response[InputTokens]:
    """Count the tokens of the prompt that the same body has as a chat."""
    caller = caller_of(request)
    authenticate(request)
    async with text_of(request) as body:
        chat = await off_loop(len(body), parse_chat, body, caller.warnings)
        served = await model_for(request, chat.model)
        [prompt] = await prompts_of(chat, served, len(body), caller.images)
        response = Response(InputTokens(input_tokens=len(prompt)))
        finish_headers(response, caller)
        return response


@get("/props")
async def show_props(request: Http, model: FromQuery[str | None] = None) -> Props:
    """A model's context, template and defaults, as llama.cpp's clients read them."""
    authenticate(request)
    served = await model_for(request, model)
    assets = served.assets
    marks = special_tokens(assets.tokenizer_config)
    overview = process_of(request).models.overview(served.name)
    return Props(
        default_generation_settings=GenerationDefaults(params=_defaults(served), n_ctx=assets.context_length),
        total_slots=_places(served),
        model_alias=model or served.name,
        model_path=served.name,
        modalities=Modalities(vision=served.images is not None),
        chat_template=assets.chat_template or "",
        bos_token=marks.get("bos_token") or "",
        eos_token=marks.get("eos_token") or "",
        build_info=f"furrow {VERSION}",
        is_sleeping=overview is not None and overview.state == "sleeping",
    )


def _defaults(served: ServedModel) -> dict[str, Any]:
    """The parameters of a request that gives none."""
    if served.assets.kind != "generate":
        return {}
    sampling = generation_request(NativeCompletion(prompt=[0], max_tokens=-1), [0], served.assets).sampling
    return settings_of(sampling, stream=False) | {"seed": _NO_SEED, "max_tokens": -1, "n_predict": -1}


def _places(served: ServedModel) -> int:
    return max(1, min(_MOST_SLOTS, served.assets.kv_tokens // served.assets.context_length))


@get("/slots")
async def list_slots(request: Http, model: FromQuery[str | None] = None) -> list[Slot]:
    """The running requests of the caller's tenant, then places that are free for it; other tenants' are not told."""
    identity = identity_of(request)
    served = await model_for(request, model)
    process = process_of(request)
    account = identity.account or identity.tenant
    running = await process.account_reads.read(account, _running, served.name, identity.tenant)
    context = served.assets.context_length
    slots = [
        Slot(
            id=place,
            n_ctx=context,
            is_processing=True,
            speculative=False,
            id_task=open_request.id,
            n_prompt_tokens=open_request.prompt_tokens,
            next_token=[NextToken(n_decoded=open_request.completion_tokens)],
        )
        for place, open_request in enumerate(running)
    ]
    free = range(len(slots), max(_places(served), len(slots) + 1))
    return slots + [Slot(id=place, n_ctx=context, is_processing=False, speculative=False) for place in free]


def _running(client: SyncRedis, model: str, tenant: str) -> list[OpenRequest]:
    return [
        open_request
        for open_request in open_requests(client, [model], _MOST_SLOTS, tenant)
        if open_request.state == "running"
    ]
