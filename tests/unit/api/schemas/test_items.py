"""Items and blocks become a chat's messages, and back to what a client may send again."""

from __future__ import annotations

from typing import Any

import pytest

from api.schemas.content_blocks import Block, chat_messages
from api.schemas.items import messages_of, read_items, sealed
from api.schemas.message_request import parse_count, parse_message
from api.schemas.responses import conversation, parse_response
from control.errors import RequestError


def items(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_of(read_items(list(given), "0" * 32))


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    """Thoughts, text and calls belong together; a text after the calls begins another message."""
    found = items(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"role": "assistant", "content": "done"},
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (found[1]["reasoning_content"], found[1]["content"]) == ("hm", "I look.")
    assert [call["id"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert [message["content"] for message in found[2:]] == ["1", "2", "done"]


def test_instructions_and_a_system_message_are_one() -> None:
    """Templates know one system message, in front."""
    body = b'{"input":[{"role":"developer","content":"B."},{"role":"user","content":"q"}],"instructions":"A."}'
    request = parse_response(body)
    chat = conversation(request, read_items(request.input, "0" * 32), stored=False)
    assert [(message.role, message.content) for message in chat.messages] == [("system", "A.\n\nB."), ("user", "q")]


def test_sealed_thoughts_come_back() -> None:
    """Our own encrypted_content is taken as the reasoning itself; any other is refused."""
    thoughts: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": sealed("hm é")}
    assert items(thoughts)[0]["reasoning_content"] == "hm é"
    with pytest.raises(RequestError) as caught:
        items(thoughts | {"encrypted_content": "gAAA!"})
    assert caught.value.param == "input[0].encrypted_content"


def test_ids_of_input_items_are_derived() -> None:
    """An item without an id gets one from its request; one with an id keeps it."""
    rid = "f" * 32
    found = read_items([{"role": "user", "content": "a"}, {"role": "user", "content": "b", "id": "msg_x"}], rid)
    assert [item["id"] for item in found] == [f"msg_{rid}_in0", "msg_x"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (b'{"type":"function","name":"a b"}', "tools[0].name"),
        (b'{"type":"function","name":"f","parameters":{"type":"array"}}', "tools[0].parameters"),
        (b'{"type":"function","name":"f","defer_loading":true}', "tools[0].defer_loading"),
        (b'{"type":"mcp","server_label":"x"}', "tools[0].type"),
    ],
)
def test_tools_are_refused_in_the_endpoint_s_names(tool: bytes, param: str) -> None:
    """Chat's wrapper around a function is not what the client sent."""
    request = parse_response(b'{"input":"x","tools":[' + tool + b"]}")
    with pytest.raises(RequestError) as caught:
        conversation(request, read_items(request.input, "0" * 32), stored=False)
    assert caught.value.param == param


def test_tool_choices_of_both_apis_become_those_of_chat() -> None:
    """Both APIs' ways to force or forbid a call are chat's own."""
    told = b'"tools":[{"type":"function","name":"f"}],"input":"x"'
    for choice, expected in ((b'"required"', "required"), (b'{"type":"function","name":"f"}', "f")):
        request = parse_response(b"{" + told + b',"tool_choice":' + choice + b"}")
        asked = conversation(request, read_items("x", "0" * 32), stored=False)
        offer = asked.offer
        assert offer is not None and offer.must
        assert (offer.functions[0].name if offer.named else "required") == expected
    body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":9,"tools":[{"name":"f","input_schema":{}}]'
    for kind, must in ((b"any", True), (b"auto", False)):
        offer = parse_message(body + b',"tool_choice":{"type":"' + kind + b'","disable_parallel_tool_use":true}}').offer
        assert offer is not None and (offer.must, offer.single) == (must, True)
    assert parse_message(body + b',"tool_choice":{"type":"none"}}').offer is None


def test_a_turn_with_results() -> None:
    """Results come before what the user says, whatever their order in the turn."""
    turn = [
        Block(type="text", text="so?"),
        Block(type="tool_result", tool_use_id="a", content=[{"type": "text", "text": "1"}], is_error=True),
    ]
    assert chat_messages("user", turn, "messages[0]") == [
        {"role": "tool", "tool_call_id": "a", "content": "Error: 1"},
        {"role": "user", "content": "so?"},
    ]


def test_counting_needs_no_limit() -> None:
    """The body of count_tokens is that of a message without what concerns the answer."""
    assert parse_count(b'{"messages":[{"role":"user","content":"x"}]}').messages[0].content == "x"
    with pytest.raises(RequestError) as caught:
        parse_count(b'{"messages":[{"role":"user","content":"x"}],"max_tokens":9}')
    assert caught.value.param == "max_tokens"
