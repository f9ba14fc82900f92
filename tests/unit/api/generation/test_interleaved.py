"""A token that ends a call may begin text; or a reasoning; each stays where it belongs, in every dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.chat.piece import CallDelta, Piece
from api.generation.message_events import MessageEventBuilder
from api.generation.response_events import ResponseEventBuilder
from api.schemas.answers import TokenCounts
from api.schemas.view import View
from tests.unit.api.chat.test_answer import VOCABULARY
from tests.unit.api.response_fields import response_fields

MESSAGE: dict[str, Any] = {"hides_thinking": False, "cut": False}
USAGE = TokenCounts(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
PIECES = [
    Piece(1, 0, reasoning="I think."),
    Piece(2, 0, calls=[CallDelta(0, "c0", "f", '{"a": ')]),
    Piece(3, 0, calls=[CallDelta(0, "c0", None, "1}")], reasoning="Well."),
    Piece(4, 0, calls=[CallDelta(1, "c1", "g", "{")]),
    Piece(5, 0, calls=[CallDelta(1, "c1", None, "}")], text="Done."),
    Piece(6, 0, finish="stop"),
]


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_a_call_that_ends_in_the_token_of_the_next_text(dialect: Any) -> None:
    """No call is opened twice, and what is interleaved comes in its order."""
    if dialect == "responses":
        view = View(endpoint="responses", created=0, model="m", extra_fields=response_fields())
        builder: Any = ResponseEventBuilder("r", view, VOCABULARY)
    else:
        builder = MessageEventBuilder("r", View(endpoint="messages", created=0, model="m", extra_fields=MESSAGE))
    builder.begin()
    for piece in PIECES:
        builder.tell(piece, USAGE)
    builder.end(USAGE, None, 0.0)
    whole = msgspec.to_builtins(builder.whole())
    if dialect == "responses":
        shown = [
            item.get("arguments") or item["content"][0]["text"]
            if item["type"] != "function_call"
            else item["arguments"]
            for item in whole["output"]
        ]
    else:
        kinds = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        shown = [block[kinds[block["type"]]] for block in whole["content"]]
        shown = [{str({"a": 1}): '{"a": 1}', "{}": "{}"}.get(str(one), one) for one in shown]
    assert shown == ["I think.", '{"a": 1}', "Well.", "{}", "Done."]
