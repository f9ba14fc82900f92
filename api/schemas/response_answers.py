"""The answers of /v1/responses: output items, the events in which they grow, and the response around them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from api.schemas.answers import Shape, Timings, TokenLogprob

Unset = UnsetType
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape, tag_field="type", tag="output_text", kw_only=True):
    annotations: list[Any] = []
    logprobs: list[TokenLogprob]
    text: str


class ReasoningText(Shape, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Shape, tag_field="type", tag="summary_text"):
    text: str


class InputText(Shape, tag_field="type", tag="input_text"):
    text: str


class MessageItem(Shape, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class UserMessageItem(Shape, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["user"]
    content: list[InputText]


class ReasoningItem(Shape, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCallItem(Shape, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | Unset = UNSET


class CustomToolCallItem(Shape, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | Unset = UNSET


class LocalShellAction(Shape, tag_field="type", tag="exec", kw_only=True):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None
    user: str | None = None
    working_directory: str | None


class LocalShellCallItem(Shape, tag_field="type", tag="local_shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: LocalShellAction


class ShellAction(Shape):
    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None = None


class LocalEnvironment(Shape, tag_field="type", tag="local"):
    """The client runs the commands."""


class ShellCallItem(Shape, tag_field="type", tag="shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction
    environment: LocalEnvironment


class PatchOperation(Shape):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | Unset = UNSET


class ApplyPatchCallItem(Shape, tag_field="type", tag="apply_patch_call"):
    id: str
    status: ItemStatus
    call_id: str
    operation: PatchOperation


class CompactionItem(Shape, tag_field="type", tag="compaction"):
    """A summary of a conversation, for the client to send back in its place."""

    id: str
    encrypted_content: str


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
    cache_write_tokens: int = 0


class OutputTokensDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Shape, kw_only=True):
    code: str = "server_error"
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseObject(Shape, kw_only=True):
    """`output` grows while the response runs; the fields after `metadata` repeat the request, defaults filled in."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    service_tier: str = "default"
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
    timings: Timings | Unset = UNSET


class StoredOutput(Struct):
    """The parts of a stored response, which is JSON, that a conversation needs."""

    id: str
    status: Status
    output: list[dict[str, Any]]


class CompactedResponse(Shape, kw_only=True):
    """A conversation made shorter: the user's newest messages, and a summary of all of it."""

    object: Literal["response.compaction"] = "response.compaction"
    id: str
    created_at: int
    usage: ResponseUsage
    output: list[UserMessageItem | CompactionItem]
    timings: Timings | Unset = UNSET


class ResponseEvent(Shape, tag_field="type", kw_only=True):
    """Numbered from 0; the last one is response.completed, .incomplete or .failed."""

    timings: Timings | Unset = UNSET
    """In deltas and in the last event, where the request asks for them."""
    sequence_number: int = 0


class ResponseCreated(ResponseEvent, tag="response.created"):
    response: ResponseObject


class ResponseQueued(ResponseEvent, tag="response.queued"):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(ResponseEvent, tag="response.failed"):
    response: ResponseObject


class ErrorEvent(ResponseEvent, tag="error"):
    code: str | None
    message: str
    param: str | None


class OutputItemAdded(ResponseEvent, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent):
    """Of one output item."""

    item_id: str
    output_index: int


class ContentEvent(ItemEvent):
    """Of one part of an item's content."""

    content_index: int


class SummaryEvent(ItemEvent):
    """Of one part of a reasoning's summary."""

    summary_index: int


class ContentPartAdded(ContentEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(ContentEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(ContentEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(ContentEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(ContentEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(ContentEvent, tag="response.reasoning_text.done"):
    text: str


class SummaryPartAdded(SummaryEvent, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(SummaryEvent, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryTextDelta(SummaryEvent, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryTextDone(SummaryEvent, tag="response.reasoning_summary_text.done"):
    text: str


class CallArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class CallArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


class Compacting(ItemEvent, tag="response.compaction.compacting"):
    pass


class ShellCommandAdded(ResponseEvent, tag="response.shell_call_command.added"):
    output_index: int
    command: str
    command_index: int


class ShellCommandDelta(ResponseEvent, tag="response.shell_call_command.delta"):
    output_index: int
    delta: str
    command_index: int


class ShellCommandDone(ResponseEvent, tag="response.shell_call_command.done"):
    output_index: int
    command: str
    command_index: int


def _leaves(kind: type[ResponseEvent]) -> list[type[ResponseEvent]]:
    return [leaf for base in kind.__subclasses__() for leaf in _leaves(base) or [base]]


RESPONSE_EVENTS: tuple[type[ResponseEvent], ...] = tuple(_leaves(ResponseEvent))
