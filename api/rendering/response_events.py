"""An answer as /v1/responses tells it: output items, the events in which they grow, and the response around them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from api.chat.piece import CallDelta, Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.errors.errors import GenerationFailed, problem
from api.rendering.call_items import Call, call_item
from api.rendering.chunks import Event, Usage, scored_tokens
from api.rendering.output_items import Compaction, Item, Message, Reasoning, Seal
from api.schemas.response_tools import OfferedTool, read_tools
from api.schemas.view import COMPACTION, SEALED, View, answer_id
from control.messages import FinishReason

_NOT_SHOWN = ("include", COMPACTION)
"""Facts about the request that its response does not repeat."""
_INCOMPLETE: dict[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseEventBuilder:
    """One response, as a pure state machine: ids of items follow from the request's, so that a resume says the same."""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary, seal: Seal | None = None) -> None:
        self._rid = rid
        self._view = view
        self._vocabulary = vocabulary
        self._seal = seal
        self._items: list[Item] = []
        self._open: Item | None = None
        self._call = -1
        self._unshown: list[ScoredToken] = []
        self._begun = False
        self._finish: FinishReason | None = None
        self._settled: dict[str, Any] = {}
        """Fields that the end sets: status, error, usage …"""

    def begin(self) -> list[Event]:
        """Events that are sent before the first token."""
        waits = self._view.extra_fields["background"]
        later = "response.queued" if waits else "response.in_progress"
        response = self._response("queued" if waits else "in_progress")
        return [{"type": "response.created", "response": response}, {"type": later, "response": response}]

    def tell(self, piece: Piece, usage: Usage) -> list[Event]:
        """Events of one entry of the token log; `usage` counts up to it."""
        events: list[Event] = []
        if not self._begun and self._view.extra_fields["background"]:
            events.append({"type": "response.in_progress", "response": self._response("in_progress")})
        self._begun = True
        calls = list(piece.calls)
        if calls and calls[0].continues and calls[0].index == self._call and isinstance(self._open, Call):
            events += self._grow(calls.pop(0).arguments)  # a token may end a call and begin a text
        if piece.reasoning:
            events += [*self._turn_to("reasoning"), *self._grow(piece.reasoning)]
        events += self._say(piece)
        for call in calls:
            if call.index != self._call or not isinstance(self._open, Call):
                self._call = call.index
                events += self._begin_item(self._called(call))
            if call.arguments:
                events += self._grow(call.arguments)
        if piece.finish is not None:
            self._finish = piece.finish
            events += self._close("completed" if piece.finish in ("stop", "tool_calls") else "incomplete")
        return events

    def end(self, usage: Usage, failure: BaseException | None, now_s: float) -> list[Event]:
        """Events that end the answer, at `now_s` in Unix seconds; called once."""
        events = list[Event]()
        if COMPACTION in self._view.extra_fields and not self._items:
            events += self._turn_to("compaction")
        events += self._close("incomplete")
        status = "completed"
        if isinstance(failure, GenerationFailed) and failure.code == "request_cancelled":
            status = "cancelled"
        elif failure is not None:
            status = "failed"
            self._settled["error"] = {"code": "server_error", "message": problem(failure).body.error.message}
        elif self._finish in _INCOMPLETE:
            status = "incomplete"
            self._settled["incomplete_details"] = {"reason": _INCOMPLETE[self._finish]}
        else:
            self._settled["completed_at"] = int(now_s)
        self._settled |= {"status": status, "usage": _usage(usage)}
        kind = "response.failed" if failure is not None else f"response.{status}"
        return [*events, {"type": kind, "response": self.whole()}]

    def whole(self) -> dict[str, Any]:
        """The answer as one body, as far as it has been told."""
        whole = self._response("in_progress")
        messages = self._view.extra_fields.get(COMPACTION)
        if messages is None:
            return whole
        shared = {name: whole[name] for name in ("id", "created_at", "usage")}
        return {"object": "response.compaction", **shared, "output": [*messages, *whole["output"]]}

    def interrupted(self, error: BaseException) -> Event:
        """The event for a process that stops while the answer goes on in another one."""
        detail = problem(error).body.error
        return {"type": "error", "code": detail.code, "message": detail.message, "param": detail.param}

    def _say(self, piece: Piece) -> list[Event]:
        """The piece's text and its scores; a score without text waits for the message that it belongs to."""
        self._unshown = [] if piece.reasoning or piece.calls else self._unshown + piece.scored
        if not piece.text and not (self._unshown and isinstance(self._open, Message)):
            return []
        scored = self._unshown
        self._unshown = []
        kind = "compaction" if COMPACTION in self._view.extra_fields else "message"
        return [*self._turn_to(kind), *self._grow(piece.text, logprobs=self._scored(scored))]

    def _called(self, call: CallDelta) -> Call:
        """The item of the kind of tool that the call's name stands for."""
        name = call.name or ""
        at = len(self._items)
        return call_item(self._tools.get(name), f"{self._rid}_{at}", at, call.id, name)

    @cached_property
    def _tools(self) -> dict[str, OfferedTool]:
        return {tool.name: tool for tool in read_tools(self._view.extra_fields["tools"]).offered}

    def _begin_item(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self._open = item
        self._items.append(item)
        return events + item.open()

    def _turn_to(self, kind: str) -> list[Event]:
        """The open item is of this kind from here on."""
        if self._open is not None and self._open.kind == kind:
            return []
        at = len(self._items)
        if kind == "message":
            return self._begin_item(Message(f"msg_{self._rid}_{at}", at))
        if kind == "compaction":
            assert self._seal is not None
            return self._begin_item(Compaction(f"cmp_{self._rid}_{at}", at, self._seal))
        as_summary = self._view.extra_fields["reasoning"]["summary"] is not None
        seal = self._seal if SEALED in self._view.extra_fields["include"] else None
        return self._begin_item(Reasoning(f"rs_{self._rid}_{at}", at, as_summary=as_summary, seal=seal))

    def _grow(self, text: str, **more: Any) -> list[Event]:
        assert self._open is not None
        return self._open.grow(text, **more)

    def _close(self, status: str) -> list[Event]:
        item = self._open
        self._open = None
        return [] if item is None else item.close(status)

    def _scored(self, tokens: list[ScoredToken]) -> list[msgspec.Raw]:
        return (
            scored_tokens(self._vocabulary, self._vocabulary.token_text, tokens)
            if self._view.logprobs is not None
            else []
        )

    def _response(self, status: str) -> dict[str, Any]:
        output = [item.shown() for item in self._items]
        return {**response_object(self._rid, self._view, status, output), **self._settled}


def response_object(rid: str, view: View, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    """A response that has not ended."""
    return {
        "id": answer_id(rid, view),
        "object": "response",
        "created_at": view.created,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": view.model,
        "output": output,
        "usage": None,
        "service_tier": "default",
        "user": view.user,
        "metadata": view.metadata,
        **{name: value for name, value in view.extra_fields.items() if name not in _NOT_SHOWN},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
