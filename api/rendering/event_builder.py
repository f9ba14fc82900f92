"""What tells an answer as a sequence of typed events, whose parts begin and end: /v1/responses and /v1/messages."""

from __future__ import annotations

from typing import Any, Protocol

from api.chat.piece import Piece
from api.rendering.chunks import Usage

Event = dict[str, Any]
"""As it is sent; `type` comes first and is the event's name too."""


class EventBuilder(Protocol):
    """A pure state machine: the same pieces give the same events, whichever process tells them."""

    def begin(self) -> list[Event]:
        """What is sent before the first token."""
        ...

    def tell(self, piece: Piece, usage: Usage) -> list[Event]:
        """What one entry of the token log adds; `usage` counts up to it."""
        ...

    def end(self, usage: Usage, failure: BaseException | None, now_s: float) -> list[Event]:
        """What ends the answer, in Unix seconds; called once."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer as one body, as far as it has been told."""
        ...

    def interrupted(self, error: BaseException) -> Event:
        """This process ends, and the answer goes on elsewhere."""
        ...
