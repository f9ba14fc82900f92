"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that count and score."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get, post
from litestar.params import FromQuery

from api.chat.template import special_tokens
from api.generation.client_request import prompts_of
from api.http.turns import off_loop
from api.images.loading import RequestImages
from api.models.models import ServedModel
from api.routes.generation import Http, authenticate, caller_of, finish_headers, model_for, text_of
from api.schemas.bodies import taking
from api.schemas.decoding import decode_request
from api.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenPiece,
    generating,
    in_vllm_form,
)
from control.errors import RequestError


@post("/tokenize", status_code=200, operation_class=taking(TokenizeRequest, open_ended=True))
async def tokenize(request: Http) -> Response[TokenizeAnswer]:
    """The token ids of a text or of messages, as in a completion or a chat."""
    caller = caller_of(request)
    authenticate(request)
    async with text_of(request) as body:
        parsed = in_vllm_form(await off_loop(len(body), decode_request, body, TokenizeRequest, caller.warnings))
        served = await model_for(request, parsed.model)
        tokens = await _tokens_of(parsed, served, len(body), caller.images)
        names = served.vocabulary.tokenizer.id_to_token
        answer = TokenizeAnswer(
            count=len(tokens),
            max_model_len=served.assets.context_length,
            tokens=[_piece(served, token) if parsed.with_pieces else token for token in tokens],
            token_strs=[names(token) or "" for token in tokens] if parsed.return_token_strs else None,
        )
        response = Response(answer)
        finish_headers(response, caller)
        return response


async def _tokens_of(parsed: TokenizeRequest, served: ServedModel, size: int, images: RequestImages) -> list[int]:
    if parsed.prompt == "":  # no prompt for a completion, but a text with a length
        return await served.run(0, images.tenant, _empty, parsed.add_special_tokens is not False)
    [tokens] = await prompts_of(generating(parsed), served, size, images)
    return tokens


def _piece(served: ServedModel, token: int) -> TokenPiece:
    raw = served.vocabulary.token_bytes(token)
    try:
        return TokenPiece(id=token, piece=raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token, piece=[*raw])


def _empty(bos: bool, served: ServedModel) -> list[int]:
    return served.vocabulary.encode("", bos=bos)


@post("/detokenize", status_code=200, operation_class=taking(DetokenizeRequest, open_ended=True))
async def detokenize(request: Http) -> Response[DetokenizeAnswer]:
    """The text of token ids, special tokens written out."""
    caller = caller_of(request)
    authenticate(request)
    async with text_of(request) as body:
        parsed = await off_loop(len(body), decode_request, body, DetokenizeRequest, caller.warnings)
        served = await model_for(request, parsed.model)
        most = served.assets.context_length
        size = served.assets.vocab_size
        if len(parsed.tokens) > most:
            raise RequestError(
                f"'tokens' has {len(parsed.tokens)} ids, more than the model's context of {most}. Send them in parts.",
                param="tokens",
            )
        wrong = next((token for token in parsed.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"'tokens' has id {wrong}; this model's ids are 0 to {size - 1}.", param="tokens")
        text = await asyncio.to_thread(served.vocabulary.decode_all, parsed.tokens)
        response = Response(DetokenizeAnswer(prompt=text, content=text))
        finish_headers(response, caller)
        return response


@get("/tokenizer_info")
async def tokenizer_info(request: Http, model: FromQuery[str | None] = None) -> dict[str, Any]:
    """The tokenizer's configuration and the generation defaults as the model's author wrote them, and the chat template
    in use."""
    authenticate(request)
    served = await model_for(request, model)
    config = served.assets.tokenizer_config
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
        **special_tokens(config),
        "chat_template": served.assets.chat_template,
        "generation_config": served.assets.generation_config,
        "max_model_len": served.assets.context_length,
        "vocab_size": served.assets.vocab_size,
    }
