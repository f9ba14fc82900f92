"""An answer as /v1/responses tells it: output items, the events in which they grow, and the response around them."""

from __future__ import annotations

from typing import Any

import msgspec

from api.chat.piece import Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.errors.errors import GenerationFailed, problem
from api.rendering.chunks import Event, Usage
from api.rendering.scores import scored_tokens
from api.schemas.items import sealed
from api.schemas.view import View, answer_id
from control.messages import FinishReason

_INCOMPLETE: dict[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


class _Item:
    """One output item while it grows. `at` is its place in the output."""

    kind = ""

    def __init__(self, identity: str, at: int) -> None:
        self.identity, self.at = identity, at
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def open(self) -> list[Event]:
        return [self._event("response.output_item.added", item=self.shown(empty=True))]

    def grow(self, text: str, **more: Any) -> list[Event]:
        self._texts.append(text)
        return [self._delta(text, **more)]

    def close(self, status: str) -> list[Event]:
        self.status = status
        return [*self._closing(), self._event("response.output_item.done", item=self.shown())]

    def shown(self, empty: bool = False) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, **more: Any) -> Event:
        raise NotImplementedError

    def _closing(self) -> list[Event]:
        raise NotImplementedError

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "output_index": self.at, **more}

    def _inner(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.identity, "output_index": self.at, **more}


class _Message(_Item):
    kind = "message"

    def __init__(self, identity: str, at: int) -> None:
        super().__init__(identity, at)
        self._scored: list[msgspec.Raw] = []

    def open(self) -> list[Event]:
        part = self._part("", [])
        return [*super().open(), self._inner("response.content_part.added", content_index=0, part=part)]

    def shown(self, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self._part(self.text, self._scored)]
        told = {"id": self.identity, "type": "message", "status": self.status, "role": "assistant"}
        return told | {"content": content}

    def _delta(self, text: str, **more: Any) -> Event:
        self._scored += more["logprobs"]
        return self._inner("response.output_text.delta", content_index=0, delta=text, **more)

    def _closing(self) -> list[Event]:
        part = self._part(self.text, self._scored)
        return [
            self._inner("response.output_text.done", content_index=0, text=self.text, logprobs=self._scored),
            self._inner("response.content_part.done", content_index=0, part=part),
        ]

    def _part(self, text: str, scored: list[msgspec.Raw]) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": scored, "text": text}


class _Reasoning(_Item):
    """Thoughts: as reasoning text, or, where the request asks for summaries, whole as the summary's only part."""

    kind = "reasoning"

    def __init__(self, identity: str, at: int, *, as_summary: bool, seal: bool) -> None:
        super().__init__(identity, at)
        self._as_summary, self._seal = as_summary, seal
        self._kind = "summary_text" if as_summary else "reasoning_text"
        self._index = {"summary_index" if as_summary else "content_index": 0}
        self._of_part = "response.reasoning_summary_part" if as_summary else "response.content_part"
        self._of_text = f"response.reasoning_{'summary_text' if as_summary else 'text'}"

    def open(self) -> list[Event]:
        part = {"type": self._kind, "text": ""}
        return [*super().open(), self._inner(f"{self._of_part}.added", **self._index, part=part)]

    def shown(self, empty: bool = False) -> dict[str, Any]:
        parts = [] if empty else [{"type": self._kind, "text": self.text}]
        summary, content = (parts, []) if self._as_summary else ([], parts)
        told = {"id": self.identity, "type": "reasoning", "status": self.status, "summary": summary}
        sealed_text = sealed(self.text) if self._seal and not empty else None
        return told | {"content": content, "encrypted_content": sealed_text}

    def _delta(self, text: str, **more: Any) -> Event:
        return self._inner(f"{self._of_text}.delta", **self._index, delta=text)

    def _closing(self) -> list[Event]:
        part = {"type": self._kind, "text": self.text}
        return [
            self._inner(f"{self._of_text}.done", **self._index, text=self.text),
            self._inner(f"{self._of_part}.done", **self._index, part=part),
        ]


class _Call(_Item):
    kind = "function_call"

    def __init__(self, identity: str, at: int, call_id: str, name: str) -> None:
        super().__init__(identity, at)
        self._call_id, self._name = call_id, name

    def shown(self, empty: bool = False) -> dict[str, Any]:
        told = {"id": self.identity, "type": "function_call", "status": self.status, "call_id": self._call_id}
        return told | {"name": self._name, "arguments": "" if empty else self.text}

    def _delta(self, text: str, **more: Any) -> Event:
        return self._inner("response.function_call_arguments.delta", delta=text)

    def _closing(self) -> list[Event]:
        return [self._inner("response.function_call_arguments.done", name=self._name, arguments=self.text)]


class ResponseEventBuilder:
    """One response, as a pure state machine: ids of items follow from the request's, so that a resume says the same."""

    def __init__(self, rid: str, view: View, vocabulary: Vocabulary) -> None:
        self._rid, self._view, self._vocabulary = rid, view, vocabulary
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._call = -1
        self._unshown: list[ScoredToken] = []
        self._begun = False
        self._finish: FinishReason | None = None
        self._settled: dict[str, Any] = {}
        """Fields that the end sets: status, error, usage …"""

    def begin(self) -> list[Event]:
        """Events that are sent before the first token."""
        waits = self._view.told["background"]
        later = "response.queued" if waits else "response.in_progress"
        response = self._response("queued" if waits else "in_progress")
        return [{"type": "response.created", "response": response}, {"type": later, "response": response}]

    def tell(self, piece: Piece, usage: Usage) -> list[Event]:
        """Events of one entry of the token log; `usage` counts up to it."""
        events: list[Event] = []
        if not self._begun and self._view.told["background"]:
            events.append({"type": "response.in_progress", "response": self._response("in_progress")})
        self._begun = True
        if piece.reasoning:
            events += [*self._turn_to("reasoning"), *self._grow(piece.reasoning)]
        events += self._say(piece)
        for call in piece.calls:
            if call.index != self._call or not isinstance(self._open, _Call):
                self._call = call.index
                identity = f"fc_{self._rid}_{len(self._items)}"
                events += self._begin_item(_Call(identity, len(self._items), call.id or "", call.name or ""))
            if call.arguments:
                events += self._grow(call.arguments)
        if piece.finish is not None:
            self._finish = piece.finish
            events += self._close("completed" if piece.finish in ("stop", "tool_calls") else "incomplete")
        return events

    def end(self, usage: Usage, failure: BaseException | None, now_s: float) -> list[Event]:
        """Events that end the answer, at `now_s` in Unix seconds; called once."""
        events = self._close("incomplete")
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
        return self._response("in_progress")

    def interrupted(self, error: BaseException) -> Event:
        """The event for a process that stops while the answer goes on in another one."""
        found = problem(error).body.error
        return {"type": "error", "code": found.code, "message": found.message, "param": found.param}

    def _say(self, piece: Piece) -> list[Event]:
        """The piece's text and its scores; a score without text waits for the message that it belongs to."""
        self._unshown = [] if piece.reasoning or piece.calls else self._unshown + piece.scored
        if not piece.text and not (self._unshown and isinstance(self._open, _Message)):
            return []
        scored, self._unshown = self._unshown, []
        return [*self._turn_to("message"), *self._grow(piece.text, logprobs=self._scored(scored))]

    def _begin_item(self, item: _Item) -> list[Event]:
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
            return self._begin_item(_Message(f"msg_{self._rid}_{at}", at))
        as_summary = self._view.told["reasoning"]["summary"] is not None
        seal = "reasoning.encrypted_content" in self._view.told["include"]
        return self._begin_item(_Reasoning(f"rs_{self._rid}_{at}", at, as_summary=as_summary, seal=seal))

    def _grow(self, text: str, **more: Any) -> list[Event]:
        assert self._open is not None
        return self._open.grow(text, **more)

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
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
        **{name: value for name, value in view.told.items() if name != "include"},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
