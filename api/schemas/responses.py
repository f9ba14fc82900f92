"""The body of POST /v1/responses, its translation to a chat request, and compaction.

In a compaction the model's own summary takes the place of a conversation: for POST /v1/responses/compact, and for an
item `compaction_trigger` at the end of an input. The summary is an item that is sealed for the client, which sends it
back in place of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from api.schemas.converted import Converted, converse
from api.schemas.decoding import Warnings, decode_request, missing, refusal
from api.schemas.generation import CommonFields, check_number
from api.schemas.image_parts import client_names
from api.schemas.items import Item, Unseal, messages_of, without_images
from api.schemas.response_tools import ResponseTools, choice_of, read_tools
from api.schemas.view import COMPACTION, SEALED
from control.errors import RequestError

LOGPROBS = "message.output_text.logprobs"
"""The values of `include` that have an effect."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: str | None = None
    context: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None  # a hint: no event is padded


class ResponseRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # counts the calls of hosted tools, of which there are none
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    background: bool | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    # Known and not served.
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    access_programs: Any = None
    image: Any = None

    @property
    def summary(self) -> str | None:
        """The form of shown reasoning: None for reasoning text, else for the summary."""
        return (self.reasoning.summary or self.reasoning.generate_summary) if self.reasoning is not None else None


_PASSED_ON = {*CommonFields.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget"}
_NAMES = {
    r"^messages\b.*": "input",
    r"^max_completion_tokens$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"^reasoning_effort$": "reasoning.effort",
    r"^tool_choice\.(function|allowed_tools)": "tool_choice",
}
_NO_SUCH_ITEMS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "prompt_cache_key")


def parse_response(body: bytes, warnings: Warnings | None = None) -> ResponseRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, ResponseRequest, warnings)
    for name in ("conversation", "prompt", "moderation", "access_programs", "image"):
        if getattr(request, name) not in (None, [], {}, ""):
            raise refusal(name)
    if request.input in (None, "", []) and request.previous_response_id is None:
        raise missing("input")
    if request.background and request.store is False:
        raise RequestError("'background' needs 'store' to be true.", param="background")
    if request.max_tool_calls is not None:
        check_number("max_tool_calls", request.max_tool_calls)
    _refuse_options(request)
    warnings = warnings or Warnings()
    for text, param in _without_effect(request):
        warnings.add(text, param)
    return request


def _without_effect(request: ResponseRequest) -> Iterator[tuple[str, str]]:
    """Warnings about what is accepted and does nothing. Raises RequestError for tools that are not served."""
    for place, kind in read_tools(request.tools or []).hosted:
        yield f"'{place}' has type '{kind}'; this server runs no tools, so it is not offered.", f"{place}.type"
    for value in request.include or []:
        if value not in (LOGPROBS, SEALED, *_NO_SUCH_ITEMS):
            yield f"'include' has '{value}', which no answer of this server has.", "include"
    if request.context_management:
        yield (
            "'context_management' has no effect; use 'truncation' or POST /v1/responses/compact.",
            "context_management",
        )


def _refuse_options(request: ResponseRequest) -> None:
    options = request.stream_options
    reasoning = request.reasoning
    if options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    if reasoning is not None and reasoning.mode not in (None, "standard"):
        raise refusal("reasoning.mode")
    if reasoning is not None and reasoning.context not in (None, "auto"):
        raise refusal("reasoning.context")


def conversation(request: ResponseRequest, items: list[Item], *, stored: bool) -> Converted:
    """The chat request for `items`, the whole conversation so far. Raises RequestError in this endpoint's names."""
    tools = read_tools(request.tools or [])
    messages = messages_of([_instructions(request.instructions), *items] if request.instructions else items)
    chat: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    chat |= {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [tool.function for tool in tools.offered] or None,
        "tool_choice": choice_of(request.tool_choice, tools),
        "response_format": _response_format(request.text.format if request.text is not None else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
    }
    if request.top_logprobs or LOGPROBS in (request.include or []):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.background and request.on_disconnect is None:
        chat["on_disconnect"] = "continue"
    extra_fields = _echo(request, tools, stored=stored)
    if items and items[-1]["type"] == "compaction_trigger":
        chat["include_reasoning"] = False
        extra_fields[COMPACTION] = None
    return converse(chat, "responses", extra_fields, client_names(messages) | tools.names | _NAMES)


def _instructions(text: str) -> Item:
    return {"type": "message", "role": "system", "content": [{"type": "input_text", "text": text}]}


def _response_format(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    schema = {
        "name": text_format.name,
        "schema": text_format.schema,
        "strict": text_format.strict,
        "description": text_format.description,
    }
    for name in ("name", "schema"):
        if schema[name] is None:
            raise missing(f"text.format.{name}")
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _echo(request: ResponseRequest, tools: ResponseTools, *, stored: bool) -> dict[str, Any]:
    """The fields of the response that only repeat the request, defaults filled in."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _ECHOED}
    text = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None and request.text.format is not None:
        text["format"] = {
            name: value for name, value in msgspec.to_builtins(request.text.format).items() if value is not None
        }
    effort = request.reasoning.effort if request.reasoning is not None else None
    return fields | {
        "background": bool(request.background),
        "store": stored,
        "text": text,
        "tools": [
            {"strict": None, "parameters": None, "description": None, **tool} if tool["type"] == "function" else tool
            for tool in tools.definitions
        ],
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": request.summary},
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "include": list(request.include or []),
        "safety_identifier": request.safety_identifier,
    }


SUMMARY_TOKENS = 2048
_CONTEXT_SHARE = 4
"""A summary takes at most one part in so many of the context."""
_KEPT_CHARACTERS = 32_768
"""Of the newest messages of the user, which stand beside the summary word for word."""


def is_compaction(items: list[Item]) -> bool:
    """True for a conversation that is to be summarised."""
    return bool(items) and items[-1]["type"] == "compaction_trigger"


def summarising(request: ResponseRequest, context_length: int) -> ResponseRequest:
    """The request as it is put to the model: free text of a bounded length, and no tools."""
    most = min(SUMMARY_TOKENS, max(1, context_length // _CONTEXT_SHARE))
    return msgspec.structs.replace(
        request,
        max_output_tokens=min(request.max_output_tokens or most, most),
        truncation="auto",
        tools=None,
        tool_choice=None,
        text=None,
        include=None,
        top_logprobs=None,
    )


def kept_messages(items: list[Item]) -> list[Item]:
    """The user's newest messages, as many as are kept whole, without their images."""
    messages: list[Item] = []
    characters = 0
    for item in reversed(items):
        if item["type"] != "message" or item["role"] != "user":
            continue
        item = without_images(item)
        characters += sum(len(part["text"]) for part in item["content"])
        if characters > _KEPT_CHARACTERS:
            break
        messages.append(item)
    return messages[::-1]


def since_compaction(items: list[Item]) -> list[Item]:
    """The items that the newest summary does not stand for, and the messages beside it, without their images."""
    places = [index for index, item in enumerate(items) if item["type"] == "compaction"]
    if not places:
        return items
    before = [item for item in items[: places[-1]] if item["type"] == "message" and item["role"] != "assistant"]
    return [*map(without_images, before), *items[places[-1] :]]


def with_summaries(output: list[Item], unseal: Unseal) -> list[Item]:
    """The output of a stored response, its summaries opened."""
    return [_opened(item, unseal) if item["type"] == "compaction" else item for item in output]


def _opened(item: Item, unseal: Unseal) -> dict[str, Any]:
    return item | {"summary": unseal("compaction", item["encrypted_content"]) or ""}
