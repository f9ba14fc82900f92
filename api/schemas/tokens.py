"""Bodies and answers of the tokenizer's routes, in vLLM's shape and llama.cpp's."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.chat import ChatRequest, Message, Tool, check_tools
from api.schemas.completions import CompletionRequest
from control.errors import RequestError


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages for the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """False: no beginning-of-sequence token before the text. Messages have those of their template."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    # llama.cpp's form, in which no beginning-of-sequence token is added unless that is asked for.
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None
    """Accepted without an effect: texts may always spell special tokens."""


class TokenPiece(msgspec.Struct, kw_only=True):
    id: int
    piece: str | list[int]
    """The text, or the bytes of a token that ends inside a character."""


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    """Ids; with `with_pieces` each with its text."""
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str
    content: str
    """The same, under llama.cpp's name."""


def in_vllm_form(body: TokenizeRequest) -> TokenizeRequest:
    """The body in vLLM's names. Raises RequestError for a text under both."""
    if body.content is None:
        return body
    if body.prompt is not None or body.messages is not None:
        raise RequestError("Send one of 'content', 'prompt' and 'messages'.", param="content")
    return msgspec.structs.replace(body, prompt=body.content, add_special_tokens=bool(body.add_special))


def generating(body: TokenizeRequest) -> ChatRequest | CompletionRequest:
    """The request that has the same prompt. Raises RequestError naming the field at fault."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send either 'prompt', a text, or 'messages'.", param="prompt")
    if body.prompt is not None:
        return CompletionRequest(model=body.model, prompt=body.prompt, add_special_tokens=body.add_special_tokens)
    messages = body.messages or []
    if not messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    request = ChatRequest(
        model=body.model,
        messages=messages,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
    )
    check_tools(request.tools or [])
    return request
