"""Types of the answers of /v1/responses for the OpenAPI document; see answers.py."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.openapi.answers import NativeTimings, ScoredToken, Shape
from api.openapi.call_items import (
    ApplyPatchCallItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    LocalShellCallItem,
    ShellCallItem,
    UserMessageItem,
)

Unset = UnsetType
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Shape, tag_field="type", tag="output_text"):
    annotations: list[Any]
    logprobs: list[ScoredToken]
    text: str


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


OutputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | LocalShellCallItem
    | ShellCallItem
    | ApplyPatchCallItem
    | CompactionItem
)


class InputTokensDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Shape):
    code: str
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseAnswer(Shape):
    """`output` grows while the response runs; most other fields repeat the request, defaults filled in."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    service_tier: str
    user: str | None
    metadata: dict[str, str]
    instructions: str | list[Any] | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    prompt_cache_key: str | None
    background: bool
    store: bool
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    top_logprobs: int
    truncation: str
    safety_identifier: str | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    timings: NativeTimings | UnsetType = UNSET


class CompactedResponse(Shape):
    """A conversation made shorter: the user's newest messages, and a summary of all of it."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[UserMessageItem | CompactionItem]
    usage: ResponseUsage


class ResponseEvent(Shape):
    """Numbered from 0; the last one is response.completed, .incomplete, .failed or .cancelled."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.compaction.compacting",
        "response.shell_call_command.added",
        "response.shell_call_command.delta",
        "response.shell_call_command.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
        "error",
    ]
    sequence_number: int
    response: ResponseAnswer | Unset = UNSET
    item: OutputItem | Unset = UNSET
    item_id: str | Unset = UNSET
    output_index: int | Unset = UNSET
    content_index: int | Unset = UNSET
    summary_index: int | Unset = UNSET
    part: OutputText | ReasoningText | SummaryText | Unset = UNSET
    delta: str | Unset = UNSET
    text: str | Unset = UNSET
    logprobs: list[ScoredToken] | Unset = UNSET
    name: str | Unset = UNSET
    arguments: str | Unset = UNSET
    input: str | Unset = UNSET
    command: str | Unset = UNSET
    command_index: int | Unset = UNSET
    code: str | Unset | None = UNSET
    message: str | Unset = UNSET
    param: str | Unset | None = UNSET
    timings: NativeTimings | Unset = UNSET
