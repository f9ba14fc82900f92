"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat request that they stand for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api.schemas.content_blocks import Block, chat_messages, referenced, text_of
from api.schemas.context_edits import ContextManagement, edits_of
from api.schemas.converted import Converted, converse
from api.schemas.decoding import Warnings, decode_request, missing
from api.schemas.error_answers import UNTHREADED
from api.schemas.generation import SAMPLERS, check_number
from api.schemas.image_parts import client_names
from api.schemas.message_tools import offered_tools
from control.bounds import RANGES
from control.errors import RequestError


class Turn(msgspec.Struct, kw_only=True):
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

    messages: list[Turn]
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
        "tools": offered_tools(request.tools or [], _found(request), warnings) or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(form) if form is not None else None,
        "edits": edits_of(request.context_management, warnings),
    }
    chat |= _thinking(request)
    hides = request.thinking is not None and request.thinking.display == "omitted"
    return converse(chat, "messages", {"hides_thinking": hides}, client_names(messages) | _NAMES)


def _found(request: CountTokensRequest) -> set[str]:
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
