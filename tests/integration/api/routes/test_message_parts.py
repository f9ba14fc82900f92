"""Parts that Anthropic's clients send unasked: tools, blocks and hints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.api.calling import called, leader_with_tools
from tests.integration.api.messages import HELLO, WEATHER, send
from tests.leader import ScriptedLeader
from tests.servers import Server

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    with leader_with_tools(server) as leader:
        yield leader


def offered(leader: ScriptedLeader) -> dict[str, Any]:
    shown = leader.prompt()
    lines = shown[len("<tools>") : shown.index("</tools>")].splitlines() if shown.startswith("<tools>") else []
    return {tool["name"]: tool for line in lines for tool in [json.loads(line)["function"]]}


def test_hints_are_accepted_without_an_effect(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Fields that ask for no other answer, and tools' own hints; the answer and its prompt are the same."""
    plain = send(http)
    hints = {"inference_geo": "eu", "speed": "fast", "container": "c_1", "betas": ["x-2025"], "cache_control": {}}
    hints |= {"diagnostics": {"previous_message_id": None}, "service_tier": "flex"}
    told = send(http, **hints)
    assert told.status_code == 200, told.text
    assert told.json()["content"] == plain.json()["content"] and "warning" not in told.headers
    assert leader.claimed[0].params.prompt == leader.claimed[1].params.prompt
    tool = WEATHER | {"defer_loading": False, "allowed_callers": ["code_execution_20250825"], "cache_control": {}}
    assert send(http, tools=[tool | {"eager_input_streaming": True}]).status_code == 200
    assert offered(leader)["get_weather"]["parameters"] == WEATHER["input_schema"]


def test_examples_of_a_tools_input_are_shown(http: httpx.Client, leader: ScriptedLeader) -> None:
    send(http, tools=[WEATHER | {"description": "Weather.", "input_examples": [{"city": "Oslo"}]}])
    assert offered(leader)["get_weather"]["description"] == 'Weather.\n\nExamples of the input:\n{"city":"Oslo"}'


@pytest.mark.parametrize(
    ("tool", "name", "required", "property_"),
    [
        ({"type": "bash_20250124", "name": "bash"}, "bash", [], "restart"),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
            "str_replace_based_edit_tool",
            ["command", "path"],
            "insert_text",
        ),
        ({"type": "text_editor_20241022"}, "str_replace_editor", ["command", "path"], "new_str"),
        ({"type": "memory_20250818", "name": "memory"}, "memory", ["command"], "old_path"),
        (
            {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
            "computer",
            ["action"],
            "coordinate",
        ),
    ],
)
def test_tools_that_anthropic_defines_and_clients_run(
    http: httpx.Client, leader: ScriptedLeader, tool: dict[str, Any], name: str, required: list[str], property_: str
) -> None:
    """They are offered with an input that their requests leave out, and called as any other."""
    leader.reply = lambda _: called(name, '{"command": "view"}')
    response = send(http, tools=[tool])
    assert response.status_code == 200 and "warning" not in response.headers
    schema = offered(leader)[name]["parameters"]
    assert schema["required"] == required and property_ in schema["properties"]
    [block] = response.json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", name, {"command": "view"})


def test_tools_of_anthropics_servers_are_left_out_with_a_warning(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The rest is offered; a choice that demands one is refused, and so is any other with `--strict`."""
    servers = {"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}
    others = [SEARCH, {"type": "mcp_toolset", "mcp_server_name": "x"}, {"type": "tool_search_tool_regex_20251119"}]
    response = send(http, tools=[*others, WEATHER], **servers)
    assert response.status_code == 200 and set(offered(leader)) == {"get_weather"}
    warning = response.headers["warning"]
    assert all(name in warning for name in ("web_search_20250305", "mcp_toolset", "tool_search_tool", "mcp_servers"))
    for choice, tools in (({"type": "tool", "name": "web_search"}, [SEARCH, WEATHER]), ({"type": "any"}, [SEARCH])):
        refused = send(http, tools=tools, tool_choice=choice)
        assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]


def test_a_deferred_tool_is_offered_once_a_search_has_found_it(http: httpx.Client, leader: ScriptedLeader) -> None:
    """As Claude Code's own search does it. Where the search was to run at Anthropic, nothing is deferred."""
    tools: list[Any] = [WEATHER | {"defer_loading": True}, {"name": "search", "input_schema": {"type": "object"}}]
    assert send(http, tools=tools).status_code == 200
    assert set(offered(leader)) == {"search"}
    use = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": []}
    result["content"] = [{"type": "tool_reference", "tool_name": "get_weather"}]
    turns = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert send(http, tools=tools, messages=turns).status_code == 200
    assert set(offered(leader)) == {"get_weather", "search"}
    assert "tool: <tool_response>get_weather</tool_response>" in leader.prompt()
    send(http, tools=[*tools, {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}])
    assert set(offered(leader)) == {"get_weather", "search"}


HISTORY: list[Any] = [
    {"role": "user", "content": "What is new?"},
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "c2VjcmV0"},
            {"type": "text", "text": "I search."},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "news"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s1",
                "content": [
                    {"type": "web_search_result", "title": "T", "url": "https://n", "encrypted_content": "eA=="}
                ],
            },
            {"type": "mcp_tool_use", "id": "m1", "name": "look", "server_name": "s", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m1", "content": [{"type": "text", "text": "seen"}]},
            {"type": "text", "text": "Much.", "citations": []},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "document", "title": "D", "source": {"type": "text", "media_type": "text/plain", "data": "facts"}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "more"}]}},
            {
                "type": "search_result",
                "source": "https://s",
                "title": "S",
                "content": [{"type": "text", "text": "found"}],
            },
            {"type": "container_upload", "file_id": "f"},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def test_blocks_of_servers_tools_and_documents_in_the_history(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A readable part becomes text; any other is left out, with a warning where it asked for something."""
    response = send(http, messages=HISTORY)
    assert response.status_code == 200, response.text
    assert "container_upload" in response.headers["warning"] and "redacted" not in response.headers["warning"]
    assert leader.prompt().startswith(
        "user: What is new?\n"
        'assistant: I search.\n[web_search {"query":"news"}]\n[result: T\nhttps://n]\n'
        "[look {}]\n[result: seen]\nMuch.\n"
        "user: <document>\n<title>D</title>\nfacts\n</document>\n<document>\nmore\n</document>\n"
        "<search_result>\n<title>S</title>\n<source>https://s</source>\nfound\n</search_result>\nAnd now?\n"
    )
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HISTORY})
    assert counted.json()["input_tokens"] == len(leader.claimed[-1].params.prompt)
    assert "container_upload" in counted.headers["warning"]


def nested(depth: int) -> Any:
    content: Any = "x"
    for _ in range(depth):
        content = [{"type": "text", "content": content}]
    return content


def of_user(block: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [block]}]


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (of_user(PDF), "messages[0].content[0].source"),
        (of_user(IMAGE), "messages[0].content[0]"),
        (of_user({"type": "document", "source": "x"}), "messages[0].content[0].source"),
        (
            of_user({"type": "document", "source": {"type": "content", "content": [PDF]}}),
            "messages[0].content[0].source.content[0]",
        ),
        (of_user({"type": "tool_result", "tool_use_id": "a", "content": 5}), "messages[0].content[0].content"),
        (of_user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "messages[0].content[0].content[0]"),
        (of_user({"type": "server_tool_use", "name": "x"}), "messages[0].content[0]"),
        (of_user({"type": "y" * 5000}), "messages[0].content[0]"),
    ],
)
def test_a_block_that_this_model_can_not_read_is_named(
    http: httpx.Client, leader: ScriptedLeader, messages: list[Any], names: str
) -> None:
    """Images and files would alter the answer; wrong types are no server's error."""
    response = send(http, messages=messages)
    assert response.status_code == 400 and names in response.json()["error"]["message"]
    assert len(response.content) < 1000 and leader.claimed == []


def test_a_result_that_nests_deeply_is_no_servers_error(http: httpx.Client) -> None:
    """Of a server's result only some levels are read."""
    result = {"type": "web_fetch_tool_result", "tool_use_id": "a", "content": nested(200)}
    messages = [*HELLO, {"role": "assistant", "content": [result]}, *HELLO]
    assert send(http, messages=messages).status_code == 200
