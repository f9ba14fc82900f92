"""Malformed tools are refused by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.api.calling import ASK, WEATHER, leader_with_tools
from tests.leader import ScriptedLeader
from tests.servers import Server


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    with leader_with_tools(server) as leader:
        yield leader


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"tools": [WEATHER], "guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "no way"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 1}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_an_unservable_tool_request_is_a_400_that_names_the_field(
    http: httpx.Client, leader: ScriptedLeader, changes: dict[str, Any], param: str
) -> None:
    """A tool that can't be served is a 400 that names the field; nothing reaches a leader."""
    response = http.post("/v1/chat/completions", json={"messages": ASK} | changes)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert leader.claimed == []
