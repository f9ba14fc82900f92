"""Output items of /v1/responses while they grow: messages and reasoning, and what all items share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from api.rendering.chunks import Event

Seal = Callable[[str, str], str]
"""From an item's type and a text to what only this farm can open, for the same tenant; the same each time."""


class Item:
    """One output item while it grows. `at` is its place in the output."""

    kind = ""

    def __init__(self, identity: str, at: int) -> None:
        self.identity = identity
        self.at = at
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


class Message(Item):
    kind = "message"

    def __init__(self, identity: str, at: int) -> None:
        super().__init__(identity, at)
        self._scored: list[msgspec.Raw] = []

    def open(self) -> list[Event]:
        part = self._part("", [])
        return [*super().open(), self._inner("response.content_part.added", content_index=0, part=part)]

    def shown(self, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self._part(self.text, self._scored)]
        item = {"id": self.identity, "type": "message", "status": self.status, "role": "assistant"}
        return item | {"content": content}

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


class Compaction(Item):
    """A summary of the conversation, sealed once it is whole."""

    kind = "compaction"

    def __init__(self, identity: str, at: int, seal: Seal) -> None:
        super().__init__(identity, at)
        self._seal = seal

    def open(self) -> list[Event]:
        return [*super().open(), self._inner("response.compaction.compacting")]

    def grow(self, text: str, **more: Any) -> list[Event]:
        self._texts.append(text)
        return []

    def shown(self, empty: bool = False) -> dict[str, Any]:
        sealed = "" if empty else self._seal(self.kind, self.text)
        return {"id": self.identity, "type": self.kind, "encrypted_content": sealed}

    def _closing(self) -> list[Event]:
        return []


class Reasoning(Item):
    """Thoughts: as reasoning text, or, where the request asks for summaries, whole as the summary's only part."""

    kind = "reasoning"

    def __init__(self, identity: str, at: int, *, as_summary: bool, seal: Seal | None) -> None:
        super().__init__(identity, at)
        self._as_summary = as_summary
        self._seal = seal
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
        item = {"id": self.identity, "type": "reasoning", "status": self.status, "summary": summary}
        sealed = self._seal("reasoning", self.text) if self._seal is not None and not empty else None
        return item | {"content": content, "encrypted_content": sealed}

    def _delta(self, text: str, **more: Any) -> Event:
        return self._inner(f"{self._of_text}.delta", **self._index, delta=text)

    def _closing(self) -> list[Event]:
        part = {"type": self._kind, "text": self.text}
        return [
            self._inner(f"{self._of_text}.done", **self._index, text=self.text),
            self._inner(f"{self._of_part}.done", **self._index, part=part),
        ]
