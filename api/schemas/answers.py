"""The answers of /v1/chat/completions and /v1/completions in OpenAI's form, and what all endpoints share: counts,
times, log probabilities and errors.

They are encoded from these structs, and the OpenAPI document is made of the same ones. Fields that an answer may lack
are UNSET; a field with another default is always there. The order of fields is that of the bytes.
"""

from __future__ import annotations

from typing import Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]

encode = msgspec.json.Encoder().encode
Value = TypeVar("Value")


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """An answer has no other fields."""


def encoded_once(value: Value) -> Value:
    """A part of an answer that is encoded here and now, however often it is shown."""
    return cast(Value, msgspec.Raw(encode(value)))


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    """With `prediction`: its tokens that the answer has."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Its other tokens. They are not among `completion_tokens`."""


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenCounts(msgspec.Struct, kw_only=True):
    """The tokens of one answer, which each endpoint shows in its own form."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt tokens: those that were not computed for this answer."""
    reasoning_tokens: int = 0
    """Of the completion tokens: those of the model's reasoning."""
    predicted: tuple[int, int] | None = None
    """Tokens of the prediction that the answer has, and those that it has not; None without a prediction."""

    def usage(self) -> TokenUsage:
        """The counts in OpenAI's form."""
        details = CompletionTokensDetails(self.reasoning_tokens)
        if self.predicted is not None:
            details.accepted_prediction_tokens, details.rejected_prediction_tokens = self.predicted
        return TokenUsage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            PromptTokensDetails(self.cached_tokens),
            details,
        )


class Timings(Shape):
    """llama.cpp's: tokens that were taken from the cache, computed of the prompt, and generated, with their times."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class PromptLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt, each by its id, with the most likely ones at its place."""


class FunctionCall(Shape):
    name: str
    arguments: str
    """JSON."""


class FunctionToolCall(Shape, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(Shape, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Shape, kw_only=True):
    """A part of a call; only the first has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: str | None = None


class ChatMessage(Shape, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same: clients look for one of both names."""
    tool_calls: list[FunctionToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionCallDelta | UnsetType = UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Shape, kw_only=True):
    """With `stream_options.include_usage` each has `usage`, null in all but the last one; with
    `continuous_usage_stats` each has the counts so far.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: TokenUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Shape, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[CompletionChoice]
    usage: TokenUsage
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Shape, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


UNTHREADED = "thread_unsupported_request"
"""Anthropic's code for a request that can't be part of a conversation that the server keeps."""


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    """The parameter at fault, if any."""
    code: str | None


class Error(Shape):
    """OpenAI's error body; after a stream's first byte it is the data of an event."""

    error: ErrorObject


class ErrorDetails(Shape):
    """Facts for programs."""

    error_code: str
    unsupported: list[str]


class MessageErrorObject(Shape):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET
    code: str | UnsetType | None = UNSET


class MessageError(Shape, tag_field="type", tag="error"):
    """Anthropic's error body, and the data of an error event."""

    error: MessageErrorObject
    request_id: str | None


class OllamaError(Shape):
    """Ollama's error body, and the last line of a stream that fails."""

    error: str
