"""The protocol of the builders that turn an answer into typed events: /v1/responses and /v1/messages."""

from __future__ import annotations

from typing import Any, Protocol

from api.chat.piece import Piece
from api.rendering.chunks import Usage

Event = dict[str, Any]
"""As it is sent; `type` comes first and is the event's name too."""


class EventBuilder(Protocol):
    """A pure state machine: the same pieces give the same events in every process."""

    def begin(self) -> list[Event]:
        """Events that are sent before the first token."""
        ...

    def tell(self, piece: Piece, usage: Usage) -> list[Event]:
        """Events of one entry of the token log; `usage` counts up to it."""
        ...

    def end(self, usage: Usage, failure: BaseException | None, now_s: float) -> list[Event]:
        """Events that end the answer, at `now_s` in Unix seconds; called once."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer as one body, as far as it has been told."""
        ...

    def interrupted(self, error: BaseException) -> Event:
        """The event for a process that stops while the answer goes on in another one."""
        ...
