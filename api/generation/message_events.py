"""An answer as /v1/messages tells it: content blocks, the events in which they grow, and the message around them."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import UNSET, UnsetType, structs

from api.chat.piece import Piece
from api.generation.chunks import arguments_object
from api.http.errors import anthropic_error, problem
from api.schemas.answers import TokenCounts
from api.schemas.messages import (
    AppliedEdit,
    AppliedEdits,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageObject,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingTokens,
    ToolUseBlock,
)
from api.schemas.view import View, answer_id

_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessageEventBuilder:
    """One message, as a pure state machine; its methods are those of ResponseEventBuilder."""

    def __init__(self, rid: str, view: View) -> None:
        self._rid = rid
        self._view = view
        self._blocks: list[OutputBlock] = []
        self._texts: list[str] = []
        """Of the block that is open."""
        self._is_open = False
        self._call = -1
        self._begun = False
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None
        self._usage = MessageUsage(input_tokens=0, output_tokens=0)
        self._edits: AppliedEdits | UnsetType = UNSET
        """The edits of the conversation, where the client asked for some."""
        applied = view.extra_fields.get("applied_edits")
        if applied is not None:
            self._edits = AppliedEdits(msgspec.convert(applied, list[AppliedEdit]))

    def begin(self) -> list[MessageEvent]:
        return []  # the message begins with its first token: only then it is known what was read from the cache

    def tell(self, piece: Piece, counts: TokenCounts) -> list[MessageEvent]:
        events = self._start(counts)
        calls = list(piece.calls)
        if calls and calls[0].continues and calls[0].index == self._call and self._inside(ToolUseBlock):
            events += self._argue(calls.pop(0).arguments)  # a token may end a call and begin a text
        if piece.reasoning:
            events += self._turn_to(ThinkingBlock(thinking="", signature=""))
            self._texts.append(piece.reasoning)
            if not self._view.extra_fields["hides_thinking"]:
                events.append(self._delta(ThinkingDelta(piece.reasoning)))
        if piece.text:
            events += self._turn_to(TextBlock(""))
            self._texts.append(piece.text)
            events.append(self._delta(TextDelta(piece.text)))
        for call in calls:
            if call.index != self._call or not self._inside(ToolUseBlock):
                self._call = call.index
                events += self._close()
                events += self._open(ToolUseBlock(call.id or "", call.name or "", {}))
            events += self._argue(call.arguments)
        if piece.finish is not None:
            events += self._close()
            self._stop_sequence = piece.stop
            self._stop_reason = "stop_sequence" if piece.stop else _STOP_REASONS.get(piece.finish, self._ended())
            if piece.finish == "length" and self._view.extra_fields["cut"]:
                self._stop_reason = "model_context_window_exceeded"
        return events

    def end(self, counts: TokenCounts, failure: BaseException | None, now_s: float) -> list[MessageEvent]:
        if failure is not None:
            return [anthropic_error(problem(failure), self._rid)]
        self._usage = _usage(counts)
        delta = StopDelta(self._stop_reason, self._stop_sequence)
        return [MessageDelta(delta, self._usage, self._edits), MessageStop()]

    def whole(self) -> MessageObject:
        return MessageObject(
            id=answer_id(self._rid, self._view),
            model=self._view.model,
            content=list(self._blocks),
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=structs.replace(self._usage, service_tier="standard"),
            context_management=self._edits,
        )

    def interrupted(self, error: BaseException) -> MessageEvent:
        refusal = problem(error)
        event = anthropic_error(refusal, self._rid)
        event.error.code = refusal.body.error.code  # by which a client that resumes knows that it can
        return event

    def _ended(self) -> StopReason:
        """The reason why the model stopped by itself: a call that it was told to make ends its turn as any other."""
        return "tool_use" if any(isinstance(block, ToolUseBlock) for block in self._blocks) else "end_turn"

    def _start(self, counts: TokenCounts) -> list[MessageEvent]:
        if self._begun:
            return []
        self._begun = True
        self._usage = _usage(counts)
        return [MessageStart(self.whole()), Ping()]

    def _argue(self, arguments: str) -> list[MessageEvent]:
        """The next part of the arguments of the call that is open."""
        if not arguments:
            return []
        self._texts.append(arguments)
        return [self._delta(InputJsonDelta(arguments))]

    def _inside(self, kind: type[OutputBlock]) -> bool:
        return self._is_open and isinstance(self._blocks[-1], kind)

    def _turn_to(self, empty: OutputBlock) -> list[MessageEvent]:
        """The open block is of this kind from here on."""
        return [] if self._inside(type(empty)) else [*self._close(), *self._open(empty)]

    def _open(self, empty: OutputBlock) -> list[MessageEvent]:
        self._is_open = True
        self._texts = []
        self._blocks.append(structs.replace(empty))
        return [ContentBlockStart(len(self._blocks) - 1, empty)]

    def _delta(self, delta: BlockDelta) -> MessageEvent:
        return ContentBlockDelta(len(self._blocks) - 1, delta)

    def _close(self) -> list[MessageEvent]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        text = "".join(self._texts)
        events: list[MessageEvent] = []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ToolUseBlock):
            block.input = arguments_object(text)
        else:
            block.thinking = "" if self._view.extra_fields["hides_thinking"] else text
            block.signature = hashlib.sha256(text.encode()).hexdigest()  # clients want one; it is not checked
            events.append(self._delta(SignatureDelta(block.signature)))
        return [*events, ContentBlockStop(len(self._blocks) - 1)]


def _usage(counts: TokenCounts) -> MessageUsage:
    """Anthropic counts what was read from the cache apart from the other input."""
    usage = MessageUsage(
        input_tokens=counts.prompt_tokens - counts.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=counts.cached_tokens,
        output_tokens=counts.completion_tokens,
    )
    if counts.reasoning_tokens:
        usage.output_tokens_details = ThinkingTokens(counts.reasoning_tokens)
    return usage
