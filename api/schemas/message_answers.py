"""The answers of /v1/messages, in Anthropic's form."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape
from api.schemas.error_answers import MessageError

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


Block = TextBlock | ThinkingBlock | ToolUseBlock
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
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | Unset = UNSET


# --- events ---


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
    content_block: Block


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
