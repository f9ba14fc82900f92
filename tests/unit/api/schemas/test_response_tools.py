"""Tools of /v1/responses become functions; and `tool_choice` about them."""

from __future__ import annotations

from typing import Any

import pytest

from api.schemas.response_tools import choice_of, read_tools
from control.errors import RequestError

F: dict[str, Any] = {"type": "function", "name": "f"}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patches.", "format": PATCH}
MAIL: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__mail__",
    "description": "Mail.",
    "tools": [{"type": "function", "name": "send", "description": "Sends."}, {"type": "custom", "name": "raw"}],
}
BUILT_IN: list[dict[str, Any]] = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["a"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "x"},
    {"type": "image_generation"},
    {"type": "computer_use_preview"},
    {"type": "tool_search"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]


def names(*tools: dict[str, Any]) -> list[str]:
    return [tool.name for tool in read_tools(list(tools)).offered]


def test_each_tool_is_a_function_with_a_name_of_its_own() -> None:
    """Namespaces and built-in tools give way to the names that the client chose."""
    assert names(F, CUSTOM, MAIL, *BUILT_IN) == [
        "f", "patch", "mcp__mail__send", "mcp__mail__raw", "local_shell", "shell", "apply_patch",
    ]  # fmt: skip
    taken = {"type": "function", "name": "mcp__mail__send"}
    assert names(taken, {"type": "custom", "name": "apply_patch"}, MAIL, {"type": "apply_patch"}) == [
        "mcp__mail__send", "apply_patch", "mcp__mail__send_2", "mcp__mail__raw", "apply_patch_2",
    ]  # fmt: skip
    [odd] = names({"type": "namespace", "name": "my tools" * 20, "tools": [{"type": "function", "name": "é"}]})
    assert len(odd) <= 128 and odd.isascii() and " " not in odd


def test_a_custom_tool_takes_one_text_that_its_grammar_bounds() -> None:
    [tool] = read_tools([CUSTOM]).offered
    function = tool.function["function"]
    assert function["strict"] and function["parameters"]["required"] == ["input"]
    assert function["parameters"]["properties"]["input"] == {"type": "string", "x-lark": 'start: "x"+'}
    assert function["description"].startswith("Patches.\n\n") and 'start: "x"+' in function["description"]
    regex = {"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    [tool] = read_tools([regex]).offered
    assert tool.function["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    [tool] = read_tools([{"type": "custom", "name": "n"}]).offered
    assert "strict" not in tool.function["function"] and "description" not in tool.function["function"]


def test_a_namespace_is_described_with_its_first_tool() -> None:
    first, second = read_tools([MAIL]).offered
    assert first.function["function"]["description"] == "Mail.\nSends."
    assert "description" not in second.function["function"]
    assert (first.namespace, first.own, first.place) == ("mcp__mail__", "send", "tools[0].tools[0]")


def test_hosted_tools_are_not_offered() -> None:
    read = read_tools([*HOSTED, F])
    assert [tool.name for tool in read.offered] == ["f"] and read.definitions == [F]
    assert [kind for _, kind in read.hosted] == [tool["type"] for tool in HOSTED]
    assert read.names == {r"^tools\[0\](\.function)?": "tools[8]"}


@pytest.mark.parametrize(
    "choice, wanted",
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "apply_patch"}, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "function", "name": "send", "namespace": "mcp__mail__"}, "mcp__mail__send"),
        ({"type": "function", "name": "send"}, "mcp__mail__send"),
        ({"type": "function", "name": "mcp__mail__send"}, "mcp__mail__send"),
    ],
)
def test_a_choice_names_a_tool_of_any_kind(choice: dict[str, Any], wanted: str) -> None:
    tools = read_tools([F, CUSTOM, MAIL, *BUILT_IN])
    assert choice_of(choice, tools) == {"type": "function", "function": {"name": wanted}}


def test_allowed_tools_of_any_kind() -> None:
    tools = read_tools([F, CUSTOM, MAIL, *BUILT_IN, *HOSTED])
    listed: list[Any] = [{"type": "custom", "name": "patch"}, {"type": "mcp", "server_label": "x"}, {"type": "shell"}]
    found = choice_of({"type": "allowed_tools", "mode": "required", "tools": listed}, tools)["allowed_tools"]
    assert found["mode"] == "required"
    assert [one["function"]["name"] for one in found["tools"]] == ["patch", "shell"]
    assert choice_of({"type": "allowed_tools", "mode": "auto", "tools": [HOSTED[0]]}, tools) == "none"
    inner = choice_of({"type": "namespace", "name": "mcp__mail__"}, tools)["allowed_tools"]
    assert inner["mode"] == "required" and len(inner["tools"]) == 2


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search_preview_2025_03_11"},
        {"type": "mcp", "server_label": "x"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]},
    ],
)
def test_a_choice_that_demands_a_hosted_tool_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match="this one runs no tools") as refused:
        choice_of(choice, read_tools(HOSTED))
    assert refused.value.param == "tool_choice"
    assert choice_of("auto", read_tools(HOSTED)) is None


@pytest.mark.parametrize(
    "tool, param",
    [
        ({"type": "telepathy"}, "tools[0].type"),
        ({"name": "f"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "custom", "name": "c", "format": {"type": "image"}}, "tools[0].format.type"),
        ({"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "gbnf"}}, "tools[0].format.syntax"),
        ({"type": "custom", "name": "c", "format": PATCH | {"definition": " "}}, "tools[0].format.definition"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        ({"type": "namespace", "name": "n", "tools": [F] * 200_000}, "tools[0].tools"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}, "tools[0].tools[0].type"),
    ],
)
def test_what_is_wrong_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        for read in read_tools([tool]).offered:
            _ = read.function
    assert refused.value.param == param


def test_too_many_tools_are_refused_before_they_are_read() -> None:
    """Hosted ones count, too: each would make a warning."""
    with pytest.raises(RequestError, match="at most 1024") as refused:
        read_tools([HOSTED[0]] * 200_000)
    assert refused.value.param == "tools"


def test_grammars_are_bounded_together() -> None:
    tools = [{**CUSTOM, "name": f"c{index}", "format": PATCH | {"definition": "x" * 8000}} for index in range(9)]
    with pytest.raises(RequestError, match="65536 characters") as refused:
        read_tools(tools)
    assert refused.value.param == "tools"
