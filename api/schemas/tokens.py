"""Bodies and answers of the tokenizer's routes, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from api.schemas.messages import Message
from api.schemas.tools import Tool, check_tools
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


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    prompt: str


def generating(asked: TokenizeRequest) -> ChatRequest | CompletionRequest:
    """The request that has the same prompt. Raises RequestError naming the field at fault."""
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("Send either 'prompt', a text, or 'messages'.", param="prompt")
    if asked.prompt is not None:
        return CompletionRequest(model=asked.model, prompt=asked.prompt, add_special_tokens=asked.add_special_tokens)
    messages = asked.messages or []
    if not messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    request = ChatRequest(
        model=asked.model,
        messages=messages,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        tools=asked.tools,
    )
    check_tools(request.tools or [])
    return request
