"""The body of POST /v1/responses, and the chat request that it stands for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api.schemas.bounds import check_number
from api.schemas.client_warnings import Warnings
from api.schemas.converted import Converted, converse
from api.schemas.decoding import decode_request
from api.schemas.generation import CommonFields
from api.schemas.items import Item, messages_of
from api.schemas.refusals import missing, refusal
from control.errors import RequestError

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


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
    include_obfuscation: bool | None = None


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
    include: list[Includable] | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known and not served.
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    access_programs: Any = None
    image: Any = None

    @property
    def summary(self) -> str | None:
        """How thoughts are shown: None as reasoning text, else as the summary."""
        return (self.reasoning.summary or self.reasoning.generate_summary) if self.reasoning is not None else None


_PASSED_ON = ({*CommonFields.__struct_fields__} - {"store"}) | {"parallel_tool_calls", "chat_template_kwargs"}
_NAMES = {
    r"^messages\b.*": "input",
    r"^max_completion_tokens$": "max_output_tokens",
    r"^response_format(\.json_schema)?": "text.format",
    r"^verbosity$": "text.verbosity",
    r"^reasoning_effort$": "reasoning.effort",
    r"^(tools\[\d+\])\.function": r"\1",
    r"^tool_choice\.(function|allowed_tools)": "tool_choice",
}
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "prompt_cache_key")


def parse_response(body: bytes, warnings: Warnings | None = None) -> ResponseRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, ResponseRequest, warnings)
    for name in ("conversation", "prompt", "moderation", "context_management", "access_programs", "image"):
        if getattr(request, name) not in (None, [], {}, ""):
            raise refusal(name)
    if request.input in (None, "", []) and request.previous_response_id is None:
        raise missing("input")
    if request.background and request.store is False:
        raise RequestError("'background' needs 'store' to be true.", param="background")
    if request.max_tool_calls is not None:
        check_number("max_tool_calls", request.max_tool_calls)
    _refuse_options(request)
    return request


def _refuse_options(request: ResponseRequest) -> None:
    options, reasoning = request.stream_options, request.reasoning
    if options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    if options is not None and options.include_obfuscation:
        raise refusal("stream_options.include_obfuscation")
    if reasoning is not None and reasoning.mode not in (None, "standard"):
        raise refusal("reasoning.mode")
    if reasoning is not None and reasoning.context not in (None, "auto"):
        raise refusal("reasoning.context")


def conversation(request: ResponseRequest, items: list[Item], *, stored: bool) -> Converted:
    """The chat request for `items`, the whole conversation so far. Raises RequestError in this endpoint's names."""
    messages = messages_of(items)
    if request.instructions:
        messages = messages_of([_instructions(request.instructions), *items])
    chat: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    chat |= {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "response_format": _response_format(request.text.format if request.text is not None else None),
        "verbosity": request.text.verbosity if request.text is not None else None,
        "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
    }
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or []):
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.background and request.on_disconnect is None:
        chat["on_disconnect"] = "continue"
    return converse(chat, "responses", _echo(request, stored=stored), _NAMES)


def _instructions(text: str) -> Item:
    return {"type": "message", "role": "system", "content": [{"type": "input_text", "text": text}]}


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """Chat's form of a function. Raises RequestError for tools that a server would have to run."""
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f"'{at}' has type {kind!r}; this server runs no tools of its own, only 'function' is served.",
            param=f"{at}.type",
            code="unsupported_parameter",
        )
    unknown = set(tool) - {"type", "name", "description", "parameters", "strict"}
    refused = sorted(name for name in unknown if tool[name] not in (None, False, [], {}))
    if refused:
        raise refusal(f"{at}.{refused[0]}")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = [_tool_choice(tool) for tool in choice.get("tools", [])]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise RequestError(
        f"'tool_choice' has type {choice.get('type')!r}; only 'function' and 'allowed_tools' are served.",
        param="tool_choice.type",
        code="unsupported_parameter",
    )


def _response_format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": asked.name, "schema": asked.schema, "strict": asked.strict, "description": asked.description}
    for name in ("name", "schema"):
        if schema[name] is None:
            raise missing(f"text.format.{name}")
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _echo(request: ResponseRequest, *, stored: bool) -> dict[str, Any]:
    """The fields of the response that only repeat the request, defaults filled in."""
    told: dict[str, Any] = {name: getattr(request, name) for name in _ECHOED}
    text = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None and request.text.format is not None:
        text["format"] = {
            name: value for name, value in msgspec.to_builtins(request.text.format).items() if value is not None
        }
    effort = request.reasoning.effort if request.reasoning is not None else None
    return told | {
        "background": bool(request.background),
        "store": stored,
        "text": text,
        "tools": [{"strict": None, "parameters": None, "description": None, **tool} for tool in request.tools or []],
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": request.summary},
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "include": list(request.include or []),
        "safety_identifier": request.safety_identifier,
    }
