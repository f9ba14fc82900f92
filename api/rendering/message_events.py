"""An answer as /v1/messages tells it: content blocks, the events in which they grow, and the message around them."""

from __future__ import annotations

import hashlib
from typing import Any

from api.chat.piece import Piece
from api.errors.errors import anthropic_error, problem
from api.rendering.chunks import Event, Usage, arguments_object
from api.schemas.view import View, answer_id

_STOP_REASONS: dict[str, str] = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessageEventBuilder:
    """One message, as a pure state machine; its methods are those of ResponseEventBuilder."""

    def __init__(self, rid: str, view: View) -> None:
        self._rid = rid
        self._view = view
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """Of the block that is open."""
        self._is_open = False
        self._call = -1
        self._begun = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0}

    def begin(self) -> list[Event]:
        return []  # the message begins with its first token: only then it is known what was read from the cache

    def tell(self, piece: Piece, usage: Usage) -> list[Event]:
        events = self._start(usage)
        calls = list(piece.calls)
        if calls and calls[0].continues and calls[0].index == self._call and self._inside("tool_use"):
            events += self._argue(calls.pop(0).arguments)  # a token may end a call and begin a text
        if piece.reasoning:
            events += self._turn_to({"type": "thinking", "thinking": "", "signature": ""})
            self._texts.append(piece.reasoning)
            if not self._view.extra_fields["hides_thinking"]:
                events.append(self._delta("thinking_delta", thinking=piece.reasoning))
        if piece.text:
            events += self._turn_to({"type": "text", "text": ""})
            self._texts.append(piece.text)
            events.append(self._delta("text_delta", text=piece.text))
        for call in calls:
            if call.index != self._call or not self._inside("tool_use"):
                self._call = call.index
                block = {"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": {}}
                events += [*self._close(), *self._open(block)]
            events += self._argue(call.arguments)
        if piece.finish is not None:
            events += self._close()
            self._stop_sequence = piece.stop
            self._stop_reason = "stop_sequence" if piece.stop else _STOP_REASONS.get(piece.finish, self._ended())
            if piece.finish == "length" and self._view.extra_fields["cut"]:
                self._stop_reason = "model_context_window_exceeded"
        return events

    def end(self, usage: Usage, failure: BaseException | None, now_s: float) -> list[Event]:
        if failure is not None:
            return [anthropic_error(problem(failure), self._rid)]
        self._usage = _usage(usage)
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        event: Event = {"type": "message_delta", "delta": delta, "usage": self._usage, **self._edits()}
        return [event, {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        return {
            "id": answer_id(self._rid, self._view),
            "type": "message",
            "role": "assistant",
            "model": self._view.model,
            "content": list(self._blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": {**self._usage, "service_tier": "standard"},
            **self._edits(),
        }

    def _edits(self) -> dict[str, Any]:
        """The edits of the conversation, where the client asked for some."""
        applied = self._view.extra_fields.get("applied_edits")
        return {} if applied is None else {"context_management": {"applied_edits": applied}}

    def interrupted(self, error: BaseException) -> Event:
        refusal = problem(error)
        event = anthropic_error(refusal, self._rid)
        event["error"]["code"] = refusal.body.error.code  # by which a client that resumes knows that it can
        return event

    def _ended(self) -> str:
        """Why the model stopped of its own accord: a call that it was told to make ends its turn as any other."""
        return "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"

    def _start(self, usage: Usage) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        self._usage = _usage(usage)
        return [{"type": "message_start", "message": self.whole()}, {"type": "ping"}]

    def _argue(self, arguments: str) -> list[Event]:
        """The next part of the arguments of the call that is open."""
        if not arguments:
            return []
        self._texts.append(arguments)
        return [self._delta("input_json_delta", partial_json=arguments)]

    def _inside(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _turn_to(self, empty: dict[str, Any]) -> list[Event]:
        """The open block is of this kind from here on."""
        return [] if self._inside(empty["type"]) else [*self._close(), *self._open(empty)]

    def _open(self, empty: dict[str, Any]) -> list[Event]:
        self._is_open = True
        self._texts = []
        self._blocks.append(dict(empty))
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": empty}]

    def _delta(self, kind: str, **more: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, **more}}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        text = "".join(self._texts)
        events = list[Event]()
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "tool_use":
            block["input"] = arguments_object(text)
        else:
            block["thinking"] = "" if self._view.extra_fields["hides_thinking"] else text
            block["signature"] = hashlib.sha256(text.encode()).hexdigest()  # clients want one; it is not checked
            events.append(self._delta("signature_delta", signature=block["signature"]))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was read from the cache apart from the other input."""
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts
