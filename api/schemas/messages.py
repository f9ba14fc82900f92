"""/v1/messages of Anthropic: the body and its checks, its conversion to a chat, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from api.schemas.answers import UNTHREADED, MessageError, Shape
from api.schemas.context_edits import ContextManagement, edits_of
from api.schemas.converted import Converted, converse
from api.schemas.decoding import Warnings, convert_part, decode_request, missing
from api.schemas.generation import SAMPLERS, check_number
from api.schemas.image_parts import Parts, chat_content, client_names, image_part, text_part
from api.schemas.message_tools import offered_tools
from control.bounds import RANGES
from control.errors import RequestError


class Block(msgspec.Struct, kw_only=True):
    """One block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None


class Source(msgspec.Struct, kw_only=True):
    """The source of a document or of an image."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None
    url: str | None = None


_SILENT = ("redacted_thinking", "fallback", "mcp_tool_listing")
"""Blocks that say nothing to a model that did not write them."""
_DROPPED = ("container_upload", "tool_addition", "tool_removal")
"""Blocks that ask for something which is not done."""


def referenced(blocks: list[Block]) -> set[str]:
    """The names of the tools that the results of searches tell the model of."""
    tool_names: set[str] = set()
    for block in blocks:
        parts = cast(list[Any], block.content) if isinstance(block.content, list) else []
        for part in parts:
            if isinstance(part, dict) and cast(dict[str, Any], part).get("type") == "tool_reference":
                tool_names.add(str(cast(dict[str, Any], part).get("tool_name")))
    return tool_names


def chat_messages(role: str, content: str | list[Block], at: str, warnings: Warnings) -> list[dict[str, Any]]:
    """The chat's messages of one turn: results of tools first, each one a message. Raises RequestError for a block."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content and role != "assistant":
        raise RequestError(f"'{at}.content' is empty; send at least one block.", param=f"{at}.content")
    blocks = [(block, f"{at}.content[{index}]") for index, block in enumerate(content)]
    blocks = [(block, path) for block, path in blocks if not _left_out(block, path, warnings)]
    if role == "assistant":
        return [_assistant(blocks)]
    results = [_result(block, path) for block, path in blocks if block.type == "tool_result" and role == "user"]
    others = [(block, path) for block, path in blocks if block.type != "tool_result" or role != "user"]
    parts = [_part(block, path) if role == "user" else text_part(text_of(block, path)) for block, path in others]
    return [*results, {"role": role, "content": chat_content(parts)}] if parts else results


def _left_out(block: Block, at: str, warnings: Warnings) -> bool:
    if block.type in _DROPPED:
        warnings.add(f"'{at}' was left out: blocks of type '{block.type}' have no effect here.", f"{at}.type")
    return block.type in _SILENT or block.type in _DROPPED


def _assistant(blocks: list[tuple[Block, str]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    for block, path in blocks:
        if block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": _required(block.name, f"{path}.name"), "arguments": arguments}
            call = {"id": _required(block.id, f"{path}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif block.type in ("server_tool_use", "mcp_tool_use"):
            arguments = msgspec.json.encode(block.input or {}).decode()
            message["content"] = _line(message, f"[{block.name} {arguments}]")
        elif block.type.endswith("_tool_result"):
            message["content"] = _line(message, f"[result: {_readable(block.content)}]")
        else:
            message["content"] = message.get("content", "") + text_of(block, path)
    if len(message) == 1:
        message["content"] = ""
    return message


def _line(message: dict[str, Any], text: str) -> str:
    """The content with a line of its own for what a server's tool did in an earlier answer."""
    content: str = message.get("content", "")
    return f"{content}{'' if not content or content.endswith(chr(10)) else chr(10)}{text}\n"


_READABLE = ("title", "url", "text", "stdout", "stderr", "data", "error_code")


def _readable(content: Any, levels: int = 8) -> str:
    """The texts of a result of a server's tool, in their order; encrypted parts have none."""
    if isinstance(content, str):
        return content
    if levels == 0 or not isinstance(content, list | dict):
        return ""
    if isinstance(content, list):
        return "\n".join(filter(None, (_readable(part, levels - 1) for part in cast(list[Any], content))))
    members = cast(dict[str, Any], content)
    texts = [members[name] for name in _READABLE if isinstance(members.get(name), str) and members[name]]
    inner = [members[name] for name in ("content", "source") if isinstance(members.get(name), list | dict)]
    return "\n".join([*texts, *filter(None, (_readable(member, levels - 1) for member in inner))])


def _result(block: Block, at: str) -> dict[str, Any]:
    identity = _required(block.tool_use_id, f"{at}.tool_use_id")
    if block.content is None or isinstance(block.content, str):
        parts: Parts = [text_part(block.content or "")]
    else:
        blocks = convert_part(block.content, list[Block], f"{at}.content")
        parts = [_part(part, f"{at}.content[{index}]") for index, part in enumerate(blocks)]
    content = chat_content(parts)
    if block.is_error:
        # Templates have no place for it, and a model must know that a call has failed.
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _part(block: Block, at: str) -> dict[str, Any]:
    """The chat's part for a block. Raises RequestError for a block that is neither text nor an image."""
    return _image(block, at) if block.type == "image" else text_part(text_of(block, at))


def _image(block: Block, at: str) -> dict[str, Any]:
    """The type that the client names is not passed on: the data show what they are."""
    at = f"{at}.source"
    source = convert_part(block.source, Source, at)
    if source.type == "base64":
        return image_part(f"data:;base64,{_required(source.data, f'{at}.data')}", f"{at}.data")
    if source.type == "url":
        return image_part(_required(source.url, f"{at}.url"), f"{at}.url")
    raise RequestError(
        f"'{at}' has type '{source.type[:80]}'; images come with the type 'base64' or 'url', as this server keeps no "
        "files.",
        param=f"{at}.type",
        code="unsupported_content",
    )


def text_of(block: Block, at: str) -> str:
    """The text that a block says to the model. Raises RequestError for a block that is no text."""
    text_reader = _TEXTS.get(block.type)
    if text_reader is None:
        raise _unserved(block.type, at)
    return text_reader(block, at)


def _unserved(kind: str, at: str) -> RequestError:
    return RequestError(
        f"'{at}' has type '{kind[:80]}'; served are text, images of users and of results, and thinking, tool_use and "
        "tool_result blocks where they belong.",
        param=f"{at}.type",
        code="unsupported_content",
    )


def _document(block: Block, at: str) -> str:
    source = convert_part(block.source, Source, f"{at}.source")
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        inner = source.content
        text = inner if isinstance(inner, str) else _plain(inner, f"{at}.source.content")
    else:
        raise RequestError(
            f"'{at}.source' has type '{source.type[:80]}'; this model takes documents of plain text. Send the "
            "document's text, with the type 'text' and 'data'.",
            param=f"{at}.source.type",
            code="unsupported_content",
        )
    return _tagged("document", [("title", block.title), ("context", block.context)], text)


def _search_result(block: Block, at: str) -> str:
    text = _plain(convert_part(block.content or [], list[Block], f"{at}.content"), f"{at}.content")
    source = block.source if isinstance(block.source, str) else None
    return _tagged("search_result", [("title", block.title), ("source", source)], text)


def _plain(blocks: list[Block], at: str) -> str:
    """The texts of blocks that must be text: what is inside of a document holds no other one."""
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unserved(block.type, f"{at}[{index}]")
    return "\n".join(_required(block.text, f"{at}[{index}].text") for index, block in enumerate(blocks))


def _tagged(tag: str, facts: list[tuple[str, str | None]], text: str) -> str:
    elements = "".join(f"<{name}>{value}</{name}>\n" for name, value in facts if value)
    return f"<{tag}>\n{elements}{text}\n</{tag}>"


def _required(value: str | None, at: str) -> str:
    if value is None:
        raise missing(at)
    return value


_TEXTS: dict[str, Callable[[Block, str], str]] = {
    "text": lambda block, at: _required(block.text, f"{at}.text"),
    "document": _document,
    "search_result": _search_result,
    "compaction": lambda block, at: block.content if isinstance(block.content, str) else "",
    "tool_reference": lambda block, at: _required(block.tool_name, f"{at}.tool_name"),
}
"""The text of a block, by its type."""


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parts of the prompt. None always means: not given."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier name of `output_config.format`."""
    context_management: ContextManagement | None = None
    mcp_servers: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Hints without an effect on the answer: what can be reused is found without them, and there is one place to run.
    cache_control: Any = None
    betas: Any = None
    container: Any = None
    diagnostics: Any = None
    speed: Any = None


class MessageRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    service_tier: str | None = None
    inference_geo: Any = None
    thread: Any = None
    # Furrow's own, and additions of other engines.
    seed: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    bad_words: list[str] | None = None
    lookup: int | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    priority: Literal["high", "normal", "low"] | None = None
    on_disconnect: str | int | float | None = None
    timeout: float | None = None
    deadline: float | None = None


_PASSED_ON = (
    *("model", "stream", "max_tokens", "temperature", "top_p"),
    *("typical_p", "bad_words", "lookup"),
    *("top_k", "min_p", "seed", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("cache_salt", "chat_template_kwargs", "priority", "on_disconnect", "timeout", "deadline"),
    *SAMPLERS,
)
_NAMES = {
    r"^messages\b.*": "messages",
    r"^stop$": "stop_sequences",
    r"^user$": "metadata.user_id",
    r"^response_format(\.json_schema)?": "output_config.format",
    r"^reasoning_effort$": "output_config.effort",
    r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"^(tools\[\d+\])\.function": r"\1",
    r"^tool_choice\.function": "tool_choice",
}


def parse_message(body: bytes, warnings: Warnings | None = None) -> Converted:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, MessageRequest, warnings)
    if request.thread is not None:
        # Under this code their client's tool runner goes on without, as with any server that keeps no conversations.
        raise RequestError(
            "'thread' is not supported by this server, which keeps no conversations here. Send all messages each time.",
            param="thread",
            code=UNTHREADED,
        )
    options = {
        "stop": request.stop_sequences,
        "user": request.metadata.user_id if request.metadata is not None else None,
    }
    return _conversation(request, options, warnings or Warnings(strict=True))


def parse_count(body: bytes, warnings: Warnings | None = None) -> Converted:
    """As `parse_message`, for a body that only asks how long its prompt is."""
    warnings = warnings or Warnings(strict=True)
    return _conversation(decode_request(body, CountTokensRequest, warnings), {}, warnings)


def _conversation(request: CountTokensRequest, options: dict[str, Any], warnings: Warnings) -> Converted:
    if request.mcp_servers not in (None, [], {}, ""):
        warnings.add("'mcp_servers' has no effect: this server asks no other one for tools.", "mcp_servers")
    choice = request.tool_choice
    form = _form(request)
    messages = _messages(request, warnings)
    prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    if prefilled:
        _check_prefill(request, messages[-1])
    chat: dict[str, Any] = {name: getattr(request, name, None) for name in _PASSED_ON}
    chat |= options | {
        "messages": messages,
        "continue_final_message": prefilled or None,
        "tools": offered_tools(request.tools or [], _referenced_tools(request), warnings) or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(form) if form is not None else None,
        "edits": edits_of(request.context_management, warnings),
    }
    chat |= _thinking(request)
    hides = request.thinking is not None and request.thinking.display == "omitted"
    return converse(chat, "messages", {"hides_thinking": hides}, client_names(messages) | _NAMES)


def _referenced_tools(request: CountTokensRequest) -> set[str]:
    """The names of deferred tools that the conversation has found."""
    return referenced([block for turn in request.messages if isinstance(turn.content, list) for block in turn.content])


def _form(request: CountTokensRequest) -> OutputFormat | None:
    return (request.output_config.format if request.output_config is not None else None) or request.output_format


def _messages(request: CountTokensRequest, warnings: Warnings) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if isinstance(request.system, str):
        messages.append({"role": "system", "content": request.system})
    elif request.system:
        texts = [text_of(block, f"system[{index}]") for index, block in enumerate(request.system)]
        messages.append({"role": "system", "content": "\n\n".join(texts)})
    for index, turn in enumerate(request.messages):
        messages += chat_messages(turn.role, turn.content, f"messages[{index}]", warnings)
    if messages and messages[-1]["role"] == "assistant" and not any(list(messages[-1].values())[1:]):
        messages.pop()  # an empty beginning of the answer
    return messages


def _check_prefill(request: CountTokensRequest, last: dict[str, Any]) -> None:
    """Anthropic's rules for a last turn of the assistant, which the answer continues."""
    at = f"messages[{len(request.messages) - 1}]"
    if "tool_calls" in last:
        raise RequestError(
            f"'{at}' has a 'tool_use' block without a result. Send a message of role user with a 'tool_result' block "
            "after it.",
            param=f"{at}.content",
        )
    text = last.get("content", "")
    if text != text.rstrip():
        raise RequestError(
            f"'{at}' is the beginning of the answer and ends with white space, which models don't continue well. "
            "Remove the white space at its end.",
            param=f"{at}.content",
        )
    if _form(request) is not None:
        raise RequestError(
            f"'output_config.format' constrains the whole answer, but '{at}' begins it. Leave one of them out.",
            param="output_config.format",
        )


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(output_format: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.schema, "strict": True}}


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    """The template's switch. Anthropic's models don't think unless they are asked to, and clients count on it."""
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        check_number("thinking.budget_tokens", request.thinking.budget_tokens, RANGES["budget_tokens"])
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    budget = request.thinking.budget_tokens if request.thinking is not None and thinks else None
    variables = request.chat_template_kwargs or {}
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **variables}}
    options |= {"thinking_token_budget": budget}
    if request.output_config is not None and request.output_config.effort is not None:
        options["reasoning_effort"] = request.output_config.effort
    return options


Unset = UnsetType


class TextBlock(Shape, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Shape, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Shape, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class ThinkingTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int | Unset = UNSET
    cache_read_input_tokens: int | Unset = UNSET
    output_tokens: int
    output_tokens_details: ThinkingTokens | Unset = UNSET
    service_tier: str | Unset = UNSET


class AppliedEdit(Shape, kw_only=True):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_tool_uses: int | Unset = UNSET
    cleared_thinking_turns: int | Unset = UNSET
    cleared_input_tokens: int


class AppliedEdits(Shape):
    applied_edits: list[AppliedEdit]


class MessageObject(Shape, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | Unset = UNSET


class TextDelta(Shape, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Shape, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Shape, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Shape, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class StopDelta(Shape):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageStart(Shape, tag_field="type", tag="message_start"):
    message: MessageObject


class Ping(Shape, tag_field="type", tag="ping"):
    """A sign of life."""


class ContentBlockStart(Shape, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class ContentBlockDelta(Shape, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Shape, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(Shape, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    context_management: AppliedEdits | Unset = UNSET


class MessageStop(Shape, tag_field="type", tag="message_stop"):
    """The end of the stream."""


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessageError
)


class OriginalTokens(Shape):
    original_input_tokens: int


class CountedTokens(Shape):
    input_tokens: int
    context_management: OriginalTokens | Unset = UNSET
