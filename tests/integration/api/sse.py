"""Server-sent events as the tests look at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ops.client.events import parsed


@dataclass
class Event:
    """One event: its id, its data decoded (None for [DONE] and for comments), and its comment."""

    id: str | None
    data: Any
    done: bool = False
    comment: str | None = None

    @property
    def text(self) -> str:
        if not isinstance(self.data, dict) or not self.data.get("choices"):
            return ""
        choice = self.data["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""


def events(lines: Iterable[str]) -> Iterator[Event]:
    for identity, data, raw in parsed(f"{line}\n".encode() for line in lines):
        if raw.startswith(b":"):
            yield Event(None, None, comment=raw[1:].decode().strip())
        elif data:
            done = data == b"[DONE]"
            yield Event(identity or None, None if done else msgspec.json.decode(data), done)


def blocks(text: str) -> list[str]:
    """The events of a stream as they were sent, comments aside."""
    return [event.raw.decode().rstrip("\n") for event in parsed([text.encode()]) if event.id]


def read_all(response: httpx.Response) -> list[Event]:
    return list(events(response.iter_lines()))


def text_of(event_list: Iterable[Event]) -> str:
    return "".join(event.text for event in event_list)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
