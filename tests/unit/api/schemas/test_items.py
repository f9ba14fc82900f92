"""Items and blocks become messages and back: what a client may send again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.schemas.decoding import Warnings
from api.schemas.items import messages_of, read_items
from api.schemas.messages import Block, chat_messages, parse_count, parse_message
from api.schemas.responses import conversation, parse_response
from control.errors import RequestError


def items(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return messages_of(read_items(list(given), "0" * 32))


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    """Thoughts, text and calls belong together; a text after the calls begins another message."""
    item_list = items(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"role": "assistant", "content": "done"},
    )
    assert [message["role"] for message in item_list] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (item_list[1]["reasoning_content"], item_list[1]["content"]) == ("hm", "I look.")
    assert [call["id"] for call in item_list[1]["tool_calls"]] == ["a", "b"]
    assert [message["content"] for message in item_list[2:]] == ["1", "2", "done"]


def test_instructions_and_a_system_message_are_one() -> None:
    """Templates know one system message, in front."""
    body = b'{"input":[{"role":"developer","content":"B."},{"role":"user","content":"q"}],"instructions":"A."}'
    request = parse_response(body)
    chat = conversation(request, read_items(request.input, "0" * 32), stored=False)
    assert [(message.role, message.content) for message in chat.messages] == [("system", "A.\n\nB."), ("user", "q")]


def test_what_is_sealed_comes_back() -> None:
    """Thoughts and a summary are opened; a seal that is not ours is left out with a warning."""
    thoughts: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "ours"}
    summary: dict[str, Any] = {"type": "compaction_summary", "encrypted_content": "ours"}
    input_items = [thoughts, thoughts | {"encrypted_content": "gAAA!"}, summary, {"role": "user", "content": "go on"}]

    def unseal(kind: str, text: str) -> str | None:
        return f"{kind} é" if text == "ours" else None

    warnings = Warnings()
    read = read_items(input_items, "0" * 32, warnings, unseal)
    assert [item["type"] for item in read] == ["reasoning", "compaction", "message"]
    [said, asked] = messages_of(read)
    assert said["reasoning_content"] == "reasoning é"
    assert said["content"] == "Summary of the conversation so far:\ncompaction é"
    assert asked == {"role": "user", "content": "go on"}
    assert len(warnings.texts) == 1 and "input[1].encrypted_content" in warnings.texts[0]
    shown = thoughts | {"encrypted_content": "gAAA!", "summary": [{"type": "summary_text", "text": "in short"}]}
    assert messages_of(read_items([shown], "0" * 32, Warnings(), unseal)) == [
        {"role": "assistant", "reasoning_content": "in short"}
    ]


CALLS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "a", "name": "send", "namespace": "mcp__mail", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "sent"},
    {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": 'a "b"\n', "status": "completed"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]},
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "status": "completed",
     "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9, "user": None}},
    {"type": "local_shell_call_output", "id": "c", "output": "total 0"},
    {"type": "shell_call", "call_id": "d", "action": {"commands": ["pwd", "ls"], "max_output_length": 5}},
    {"type": "shell_call_output", "call_id": "d", "output": [
        {"stdout": "/home\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "", "stderr": "no", "outcome": {"type": "timeout"}}]},
    {"type": "apply_patch_call", "call_id": "e", "status": "completed",
     "operation": {"type": "delete_file", "path": "x.py"}},
    {"type": "apply_patch_call_output", "call_id": "e", "status": "failed", "output": "no such file"},
]  # fmt: skip


def test_calls_of_every_kind_of_tool_are_functions_calls() -> None:
    """Each call is one of the function that the model was offered, and each result is what it says."""
    item_list = items({"role": "user", "content": "q"}, *CALLS)
    called = [message["tool_calls"][0] for message in item_list if message["role"] == "assistant"]
    assert [(call["id"], call["function"]["name"]) for call in called] == [
        ("a", "mcp__mail__send"), ("b", "patch"), ("c", "local_shell"), ("d", "shell"), ("e", "apply_patch"),
    ]  # fmt: skip
    assert [json.loads(call["function"]["arguments"]) for call in called] == [
        {},
        {"input": 'a "b"\n'},
        {"command": ["ls", "-l"], "timeout_ms": 9},
        {"commands": ["pwd", "ls"]},
        {"type": "delete_file", "path": "x.py"},
    ]
    results = [(message["tool_call_id"], message["content"]) for message in item_list if message["role"] == "tool"]
    assert results == [
        ("a", "sent"), ("b", "done"), ("c", "total 0"), ("d", "exit code 0\n/home\ntimed out\nno"),
        ("e", "no such file"),
    ]  # fmt: skip


def test_kept_calls_read_the_same_again() -> None:
    """Items that a stored response has are what a client may send again."""
    item_list = read_items(CALLS, "0" * 32)
    assert messages_of(read_items(item_list, "1" * 32)) == messages_of(item_list)
    assert [item["id"] for item in read_items(item_list, "1" * 32)] == [item["id"] for item in item_list]


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
     "mcp_list_tools", "mcp_approval_response", "computer_call", "tool_search_output"],
)  # fmt: skip
def test_items_of_hosted_tools_are_left_out_with_a_warning(kind: str) -> None:
    warnings = Warnings()
    input_items = [{"role": "user", "content": "q"}, {"type": kind, "id": "x", "anything": {"at": "all"}}]
    assert messages_of(read_items(input_items, "0" * 32, warnings)) == [{"role": "user", "content": "q"}]
    assert "input[1]" in warnings.texts[0] and kind in warnings.texts[0]
    with pytest.raises(RequestError) as refused:
        read_items(input_items, "0" * 32, Warnings(strict=True))
    assert refused.value.param == "input[1]"


def test_ids_of_input_items_are_derived() -> None:
    """An item without an id gets one from its request; one with an id keeps it."""
    rid = "f" * 32
    item_list = read_items([{"role": "user", "content": "a"}, {"role": "user", "content": "b", "id": "msg_x"}], rid)
    assert [item["id"] for item in item_list] == [f"msg_{rid}_in0", "msg_x"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (b'{"type":"function","name":"a b"}', "tools[0].name"),
        (b'{"type":"function","name":"f","parameters":{"type":"array"}}', "tools[0].parameters"),
        (b'{"type":"mcp","server_label":"x"},{"type":"function","name":"a b"}', "tools[1].name"),
        (b'{"type":"namespace","name":"n","tools":[{"name":"f","parameters":[]}]}', "tools[0].tools[0].parameters"),
        (b'{"type":"telepathy"}', "tools[0].type"),
    ],
)
def test_tools_are_refused_in_the_endpoint_s_names(tool: bytes, param: str) -> None:
    """Chat's wrapper around a function is not what the client sent."""
    with pytest.raises(RequestError) as caught:
        request = parse_response(b'{"input":"x","tools":[' + tool + b"]}")
        conversation(request, read_items(request.input, "0" * 32), stored=False)
    assert caught.value.param == param


def test_tool_choices_of_both_apis_become_those_of_chat() -> None:
    """Both APIs' ways to force or forbid a call are chat's own."""
    told = b'"tools":[{"type":"function","name":"f"}],"input":"x"'
    for choice, expected in ((b'"required"', "required"), (b'{"type":"function","name":"f"}', "f")):
        request = parse_response(b"{" + told + b',"tool_choice":' + choice + b"}")
        item_list = conversation(request, read_items("x", "0" * 32), stored=False)
        offer = item_list.offer
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
    assert chat_messages("user", turn, "messages[0]", Warnings()) == [
        {"role": "tool", "tool_call_id": "a", "content": "Error: 1"},
        {"role": "user", "content": "so?"},
    ]


def test_counting_needs_no_limit() -> None:
    """The body of count_tokens is that of a message without what concerns the answer."""
    assert parse_count(b'{"messages":[{"role":"user","content":"x"}]}').messages[0].content == "x"
    with pytest.raises(RequestError) as caught:
        parse_count(b'{"messages":[{"role":"user","content":"x"}],"max_tokens":9}')
    assert caught.value.param == "max_tokens"
