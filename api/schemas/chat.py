"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api.schemas.client_warnings import Warnings
from api.schemas.decoding import decode_request
from api.schemas.functions import FUNCTION_NAMES, FunctionCall, check_functions, choice_of, tools_of
from api.schemas.generation import UNLIMITED, GenerationFields, check_ranges
from api.schemas.messages import Message, text_of
from api.schemas.naming import naming
from api.schemas.tools import Function, Offer, Tool, ToolChoice, check_tools, offered
from control.errors import RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


_TOLD_BACK = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "response_format")


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

    def told_when_stored(self, rid: str) -> dict[str, Any]:
        """The fields of the request that a stored completion shows."""
        shown: dict[str, Any] = msgspec.to_builtins(
            {
                **{name: getattr(self, name) for name in _TOLD_BACK},
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
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """Raise RequestError naming the field at fault."""
    check_ranges(request)
    if not request.messages:
        raise RequestError("'messages' is empty; send at least one message.", param="messages")
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
