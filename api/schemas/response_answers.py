"""What /v1/responses answers, as types: they are the OpenAPI document's, and tests hold what is served against them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.schemas.answers import ScoredToken, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# --- items ---


class OutputText(Shape, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class ReasoningText(Shape, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Shape, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Shape, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Shape, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None


class CallItem(Shape, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """JSON."""


OutputItem = MessageItem | ReasoningItem | CallItem

# --- the response ---


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Shape):
    code: Literal["server_error"]
    message: str


class Incomplete(Shape):
    reason: Literal["max_output_tokens", "content_filter"]


class TextConfig(Shape):
    format: dict[str, Any]
    verbosity: str


class ReasoningConfig(Shape):
    effort: str | None
    summary: str | None


class ResponseObject(Shape):
    """What the request said, and what came of it so far."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    service_tier: Literal["default"]
    user: str | None
    metadata: dict[str, str]
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    background: bool
    store: bool
    text: TextConfig
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: ReasoningConfig
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["disabled"]


# --- events ---


class ResponseEvent(Shape):
    """The response as it is at that moment."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject
    sequence_number: int


class ItemEvent(Shape):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int


class PartEvent(Shape):
    """A part of an item begins or is done."""

    type: Literal[
        "response.content_part.added",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
    ]
    item_id: str
    output_index: int
    part: OutputText | ReasoningText | SummaryText
    sequence_number: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET


class DeltaEvent(Shape):
    """What one token added."""

    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
    ]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    logprobs: list[ScoredToken] | UnsetType = UNSET


class DoneEvent(Shape):
    """What all deltas of a part come to."""

    type: Literal[
        "response.output_text.done",
        "response.reasoning_text.done",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.done",
    ]
    item_id: str
    output_index: int
    sequence_number: int
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    logprobs: list[ScoredToken] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InterruptedEvent(Shape):
    """This process ends, and the answer goes on elsewhere."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    sequence_number: int


RESPONSE_EVENTS = (ResponseEvent, ItemEvent, PartEvent, DeltaEvent, DoneEvent, InterruptedEvent)
