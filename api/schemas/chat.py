"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api.schemas.decoding import decode_body
from api.schemas.generation import GenerationFields, check_ranges
from api.schemas.refusals import refusal, refuse_unserved
from control.errors import RequestError


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message; only text is served, the others are known so that they can be refused by name."""

    type: Literal["text", "image_url", "input_audio", "file", "video_url", "refusal"]
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    refusal: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Present in answers that clients send back as history, where they are empty.
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known and not served yet.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    moderation: Any = None
    verbosity: str | None = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_count(self) -> int | None:
        """None: no log probabilities; k: the chosen token's and k alternatives."""
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_chat(body: bytes) -> ChatRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_body(body, ChatRequest)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """Raise RequestError naming the field at fault."""
    refuse_unserved(request)
    check_ranges(request)
    if not request.messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' are both set and differ; send one of them.", param="max_tokens"
        )


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: plain dicts with text content.

    Raises RequestError for parts and roles that are not served.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, path: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise refusal(f"{path}.role")
    for name in ("tool_calls", "function_call", "audio", "annotations", "tool_call_id"):
        if getattr(message, name) not in (None, [], {}):
            raise refusal(f"{path}.{name}")
    text = _text(message, path)
    # Templates know three roles; "developer" is OpenAI's newer name for "system".
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _text(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.refusal is not None:
            return message.refusal
        raise RequestError(f"Missing required parameter: '{path}.content'.", param=f"{path}.content")
    texts: list[str] = []
    for index, part in enumerate(message.content):
        here = f"{path}.content[{index}]"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            raise RequestError(
                f"'{here}' has type '{part.type}'; this model takes text parts only.",
                param=f"{here}.{part.type}",
                code="unsupported_content",
            )
        if text is None:
            raise RequestError(f"Missing required parameter: '{here}.{part.type}'.", param=f"{here}.{part.type}")
        texts.append(text)
    return "\n".join(texts)
