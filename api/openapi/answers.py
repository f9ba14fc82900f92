"""Types of answers for the OpenAPI document; the code that writes the answers does not use them, tests do."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length", "tool_calls", "function_call", "content_filter"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """An answer has no other fields."""


# --- errors ---


class ErrorObject(Shape):
    message: str
    type: str
    param: str | None
    """The parameter at fault, if any."""
    code: str | None


class Error(Shape):
    """OpenAI's error body; after a stream's first byte it is the data of an event."""

    error: ErrorObject


# --- what all answers share ---


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


class AnswerFunction(Shape):
    name: str
    arguments: str
    """JSON."""


class AnswerCall(Shape):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerFunctionDelta(Shape):
    arguments: str
    name: str | UnsetType = UNSET


class AnswerCallDelta(Shape):
    """A part of a call; only the first has id, type and name."""

    index: int
    function: AnswerFunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class RankedToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Shape):
    content: list[ScoredToken]
    refusal: str | None


class PromptToken(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]

# --- chat ---


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    function_call: AnswerFunction | UnsetType = UNSET


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET


class Delta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCallDelta] | UnsetType = UNSET
    function_call: AnswerFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Shape):
    """With `stream_options.include_usage` each has `usage`, null in all but the last one; with
    `continuous_usage_stats` each has the counts so far.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET


# --- completions ---


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    system_fingerprint: str | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET


# --- llama.cpp's form ---


class NativeTimings(Shape):
    """Tokens that were taken from the cache, computed of the prompt, and generated, with their times."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class NativeScore(Shape):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeToken(NativeScore):
    top_logprobs: list[NativeScore]


class NativePart(Shape):
    """A part of a streamed answer."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeToken] | UnsetType = UNSET
    timings: NativeTimings | UnsetType = UNSET


class NativeAnswer(Shape):
    """The answer, and the last event of a stream, whose `content` is empty. With `response_fields` it has these alone,
    by their paths."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: NativeTimings
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    completion_probabilities: list[NativeToken] | UnsetType = UNSET


# --- the process ---


class Health(Shape):
    status: Literal["ok", "draining"]


class ModelState(Shape):
    id: str
    state: str
    paused: bool
    detail: str


class RedisMemory(Shape):
    used_bytes: int
    max_bytes: int
    """0: no limit is set."""


class Readiness(Shape):
    ready: bool
    reason: str | None
    models: list[ModelState]
    redis: list[RedisMemory]
