"""The body of POST /v1/chat/completions: messages, tools, and how they are handed to a chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from api.schemas.decoding import Names, Warnings, decode_request, missing, naming, refusal
from api.schemas.generation import UNLIMITED, GenerationFields, bound_logprobs, check_ranges
from api.schemas.image_parts import ImageSource, image_source
from control.errors import RequestError

WITH_IMAGES = ("user", "tool")
"""The roles of messages that may have images."""


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message: text, and images where the model takes them. Other types are refused by name."""

    type: Literal["text", "image_url", "input_audio", "file", "video_url", "refusal"]
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""
    """JSON text."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction | None = None
    # Clients that keep stream chunks send the place back too.
    index: int | None = None
    custom: Any = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    """`system`, `developer`, `user`, `assistant`, `tool`, `function`, or one that the model's template knows."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Present in answers that clients send back as history, where they are empty.
    refusal: str | None = None
    audio: Any = None
    function_call: CalledFunction | None = None
    """The older form of one call, whose result comes in a message with role 'function'."""


def template_messages(messages: list[Message], images: list[ImageSource] | None = None) -> list[dict[str, Any]]:
    """Plain dicts with text content and arguments as mappings. Messages with images have a list of parts; their sources
    are added to `images`, None for a model that takes none. Raises RequestError for what is not served."""
    names: dict[str, str] = {}
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.function_call is not None or message.role == "function":
            message = _modern(message, at, names, f"call_{index}")
        for call in message.tool_calls or []:
            if call.function is not None:
                names[call.id] = call.function.name
        plain.append(_plain(message, at, names, images))
    return plain


def _modern(message: Message, path: str, names: dict[str, str], new: str) -> Message:
    """A call or a result of the older form, which has no ids, in the form of tools: a result is the last call's."""
    if message.function_call is not None:
        if message.tool_calls:
            raise RequestError(
                f"'{path}' has both 'tool_calls' and 'function_call'; send one of them.", param=f"{path}.function_call"
            )
        call = ToolCall(id=new, function=message.function_call)
        return msgspec.structs.replace(message, tool_calls=[call], function_call=None)
    if message.name is None:
        raise missing(f"{path}.name")
    called = next((call_id for call_id in reversed(names) if names[call_id] == message.name), new)
    return msgspec.structs.replace(message, role="tool", tool_call_id=called, content=message.content or "")


def _plain(message: Message, path: str, names: dict[str, str], images: list[ImageSource] | None) -> dict[str, Any]:
    if message.audio not in (None, [], {}):
        raise refusal(f"{path}.audio")
    content = text_of(message, path) if images is None or not _has_images(message) else _parts(message, path, images)
    # Templates know four roles; "developer" is OpenAI's newer name for "system".
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.role == "tool":
        plain |= _result(message, path, names)
    elif message.tool_call_id is not None:
        raise RequestError(f"'{path}.tool_call_id' belongs to role 'tool'.", param=f"{path}.tool_call_id")
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"'{path}.tool_calls' belongs to role 'assistant'.", param=f"{path}.tool_calls")
        plain["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _result(message: Message, path: str, names: dict[str, str]) -> dict[str, Any]:
    """The call that a result belongs to; some templates ask for the function's name."""
    if message.tool_call_id is None:
        raise RequestError(f"Missing required parameter: '{path}.tool_call_id'.", param=f"{path}.tool_call_id")
    name = message.name or names.get(message.tool_call_id)
    return {"tool_call_id": message.tool_call_id} | ({"name": name} if name else {})


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    """A call in OpenAI's form, but with a mapping for its arguments: templates write that as JSON themselves."""
    if call.type != "function" or call.custom is not None:
        raise refusal(f"{path}.type")
    if call.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """A mapping, or the text itself where a model had written something else."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast(dict[str, Any], value) if isinstance(value, dict) else text


def _has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(part.type == "image_url" for part in message.content)


def _parts(message: Message, path: str, images: list[ImageSource]) -> list[dict[str, str]]:
    """Texts and images in their order, as templates expect them."""
    if message.role not in WITH_IMAGES:
        raise RequestError(
            f"'{path}' has images, which messages of role {' and '.join(repr(role) for role in WITH_IMAGES)} may have.",
            param=f"{path}.content",
            code="unsupported_content",
        )
    assert isinstance(message.content, list)
    parts: list[dict[str, str]] = []
    for index, part in enumerate(message.content):
        here = f"{path}.content[{index}]"
        if part.type == "image_url":
            images.append(image_source(part.image_url, f"{here}.image_url"))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text_of_part(part, here, "text and image")})
    return parts


def text_of(message: Message, path: str) -> str:
    """The content as one text. Raises RequestError for a part that is not served."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.refusal is not None:
            return message.refusal
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content or message.reasoning):
            return ""
        raise RequestError(f"Missing required parameter: '{path}.content'.", param=f"{path}.content")
    parts = enumerate(message.content)
    return "\n".join(_text_of_part(part, f"{path}.content[{index}]", "text") for index, part in parts)


def _text_of_part(part: ContentPart, here: str, kinds: str) -> str:
    """The text of a part; a model takes parts of kinds `taken`."""
    if part.type not in ("text", "refusal"):
        raise RequestError(
            f"'{here}.{part.type}' is not taken: this model takes {kinds} parts only.",
            param=f"{here}.{part.type}",
            code="unsupported_content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise RequestError(f"Missing required parameter: '{here}.{part.type}'.", param=f"{here}.{part.type}")
    return text


MAX_TOOLS = 1_024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Templates write a role as it is: it can spell no mark of a turn."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
LARK = "x-lark"
"""The keyword of a function's text parameter whose value is a Lark grammar."""


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Other types of tools are refused by name."""

    type: str = "function"
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class ToolName(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolName]


class NamedTool(ToolName, kw_only=True):
    """One function that must be called, or with type `allowed_tools` those that may be."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that the model may call."""

    functions: list[Function]
    must: bool = False
    """True if it has to call one of them."""
    named: bool = False
    """True if the client named the one that has to be called."""
    single: bool = False
    """True if only one call is wanted."""

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As templates expect tools: OpenAI's form, with what models are trained on and no more."""
        return [{"type": "function", "function": _described(function)} for function in self.functions]


def _described(function: Function) -> dict[str, Any]:
    description = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **description, "parameters": function.parameters or _NO_PARAMETERS}


def check_tools(tools: list[Tool]) -> None:
    """Raise RequestError for the first tool that is not served, or is described badly."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"'tools' has {len(tools)} entries; at most {MAX_TOOLS} are served.", param="tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        name = _function(tool, path).name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"Invalid '{path}.function.name': {name[:80]!r} must be 1 to 128 letters, digits or any of '_.:/-'.",
                param=f"{path}.function.name",
            )
        if name in names:
            raise RequestError(f"'{path}.function.name': {name!r} is there twice.", param=f"{path}.function.name")
        names.add(name)
        if wrong := _wrong_schema(cast(Function, tool.function).parameters or _NO_PARAMETERS):
            raise RequestError(
                f"Invalid schema for function {name!r}: {wrong}.",
                param=f"{path}.function.parameters",
                code="invalid_function_parameters",
            )


def _wrong_schema(parameters: dict[str, Any]) -> str | None:
    """The reason why a schema can't describe a function's parameters; None for a valid one."""
    kind, properties, required = (parameters.get(name) for name in ("type", "properties", "required"))
    if kind not in (None, "object"):
        return f"'parameters' must have the type 'object', not {kind!r:.80}"
    if properties is not None and not isinstance(properties, dict):
        return "'properties' must be an object"
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):  # type: ignore[misc]
        return "'required' must be a list of names"
    return None


def _function(tool: Tool, path: str) -> Function:
    if tool.type != "function":
        raise RequestError(
            f"'{path}' has type {tool.type[:80]!r}; this server takes tools of type 'function' only.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if tool.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    return tool.function


def offered(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """The functions that the model may call, or None. Raises RequestError for a choice that checked `tools` forbid."""
    functions = [tool.function for tool in tools or [] if tool.function is not None]
    if not functions and (choice == "required" or isinstance(choice, NamedTool)):
        raise RequestError("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if not functions or choice == "none":
        return None
    single = parallel is False
    if not isinstance(choice, NamedTool):
        return Offer(functions, must=choice == "required", single=single)
    if choice.type != "allowed_tools":
        return Offer([_function_named(choice, functions, "tool_choice")], must=True, named=True, single=True)
    if choice.allowed_tools is None or not choice.allowed_tools.tools:
        raise RequestError("'tool_choice.allowed_tools.tools' names no tool.", param="tool_choice.allowed_tools.tools")
    allowed = [
        _function_named(tool, functions, f"tool_choice.allowed_tools.tools[{index}]")
        for index, tool in enumerate(choice.allowed_tools.tools)
    ]
    return Offer(allowed, must=choice.allowed_tools.mode == "required", single=single)


def _function_named(tool: ToolName, functions: list[Function], path: str) -> Function:
    if tool.type != "function":
        raise RequestError(f"'{path}' must be of type 'function', not {tool.type[:80]!r}.", param=f"{path}.type")
    if tool.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    name = tool.function.name
    function = next((function for function in functions if function.name == name), None)
    if function is None:
        raise RequestError(f"'{path}' names {name[:80]!r}, which is not among 'tools'.", param=f"{path}.function.name")
    return function


FunctionCall = Literal["none", "auto"] | FunctionName

FUNCTION_NAMES: Names = {
    r"^tools\[(\d+)\]\.function": r"functions[\1]",
    r"^tools\b": "functions",
    r"^tool_choice(\.function)?": "function_call",
}


def tools_of(functions: list[Function]) -> list[Tool]:
    return [Tool(function=function) for function in functions]


def choice_of(call: FunctionCall | None) -> ToolChoice | None:
    """The `tool_choice` with the meaning of a `function_call`."""
    return NamedTool(function=call) if isinstance(call, FunctionName) else call


def check_functions(
    functions: list[Function] | None, call: FunctionCall | None, tools: list[Tool] | None, choice: ToolChoice | None
) -> None:
    """Raise RequestError where the two forms are mixed, or a call is demanded without functions."""
    for name, value in (("tools", tools), ("tool_choice", choice if choice != "auto" else None)):
        if functions and value:
            raise RequestError(
                f"'functions' and '{name}' are both set. Send 'tools' and 'tool_choice', or the older 'functions' and "
                "'function_call'.",
                param=name,
            )
    if isinstance(call, FunctionName) and not functions:
        raise RequestError(
            "'function_call' names a function, but there are no 'functions'. Send them, or use 'tool_choice' with "
            "'tools'.",
            param="function_call",
        )


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


_STORED_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "response_format")


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "auto", "adaptive"]


class PredictedPart(msgspec.Struct, kw_only=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True):
    """Content that the answer may repeat, such as a file that is to be edited."""

    type: Literal["content"]
    content: str | list[PredictedPart]


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    store: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    # The older names of tools and tool_choice.
    functions: list[Function] | None = None
    function_call: FunctionCall | None = None
    # The template's switch, as in Qwen's and in GLM's or DeepSeek's API.
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    # As in vLLM: how the prompt ends, and that the answer shows the message that it continues.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    @property
    def thinks(self) -> bool | None:
        """True or false where the request switches reasoning on or off."""
        if self.enable_thinking is not None or self.thinking is None:
            return self.enable_thinking
        if isinstance(self.thinking, bool):
            return self.thinking
        return None if self.thinking.type == "auto" else self.thinking.type != "disabled"

    @property
    def token_limit(self) -> int | None:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if limit == UNLIMITED else limit

    @property
    def unlimited(self) -> bool:
        return UNLIMITED in (self.max_tokens, self.max_completion_tokens)

    @property
    def offer(self) -> Offer | None:
        """The tools that the model may call. Raises RequestError for a `tool_choice` that they don't allow."""
        if self.functions:
            return offered(tools_of(self.functions), choice_of(self.function_call), False)
        return offered(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def shown_first(self) -> str:
        """The assistant's message that the answer follows, where `echo` asks for it."""
        last = self.messages[-1]
        return text_of(last, "") if self.echo and last.role == "assistant" else ""

    def stored_fields(self, rid: str) -> dict[str, Any]:
        """The fields of the request that a stored completion shows."""
        shown: dict[str, Any] = msgspec.to_builtins(
            {
                **{name: getattr(self, name) for name in _STORED_FIELDS},
                "tools": self.tools or None,
                "tool_choice": self.tool_choice,
            }
        )
        return {**shown, "request_id": rid, "input_user": self.user}

    @property
    def predicted(self) -> str:
        """The text of the prediction; empty where there is none."""
        content = self.prediction.content if self.prediction is not None else ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def logprobs_count(self) -> int | None:
        """None: no log probabilities; k: the chosen token's and k alternatives."""
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_chat(body: bytes, warnings: Warnings | None = None) -> ChatRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, ChatRequest, warnings)
    bound_logprobs(request, warnings)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """Raise RequestError naming the field at fault."""
    check_ranges(request)
    if not request.messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
    for index, message in enumerate(request.messages):
        if not _ROLE.fullmatch(message.role):
            raise RequestError(
                f"Invalid value for 'messages[{index}].role': {message.role[:80]!r} must be 1 to 64 letters, digits or "
                "any of '_.-', such as 'user'.",
                param=f"messages[{index}].role",
            )
    if request.top_logprobs and not request.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    check_functions(request.functions, request.function_call, request.tools, request.tool_choice)
    with naming(FUNCTION_NAMES if request.functions else {}):
        check_tools(tools_of(request.functions) if request.functions else request.tools or [])
        _ = request.offer  # refuses a choice that the tools don't allow
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other: the answer continues the last "
            "message, or begins a new one. Set one of them to false.",
            param="continue_final_message",
        )
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' are both set and differ; send one of them.", param="max_tokens"
        )
