"""Reading server-sent events by hand, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec


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
    identity: str | None = None
    for line in lines:
        if line.startswith("id: "):
            identity = line[4:]
        elif line.startswith(": "):
            yield Event(None, None, comment=line[2:])
        elif line == "data: [DONE]":
            yield Event(identity, None, done=True)
        elif line.startswith("data: "):
            yield Event(identity, msgspec.json.decode(line[6:]))


def blocks(text: str) -> list[str]:
    """The events of a stream as they were sent, comments aside."""
    return [block for block in re.sub(r"(?m)^:.*\n", "", text).split("\n\n") if block.startswith("id: ")]


def read_all(response: httpx.Response) -> list[Event]:
    return list(events(response.iter_lines()))


def text_of(found: Iterable[Event]) -> str:
    return "".join(event.text for event in found)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
