"""The tools of /v1/messages as a chat's functions: the client's own, and those that Anthropic defines and the client
runs, whose inputs are described here because requests don't have them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from api.schemas.decoding import Warnings, convert_part

JsonObject = dict[str, Any]


class Tool(msgspec.Struct, kw_only=True):
    """A function of the client. Hints that change nothing for the model are not read."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class OwnTool(msgspec.Struct, kw_only=True):
    """A tool that Anthropic defines and the client runs."""

    type: str
    name: str | None = None
    input_examples: list[dict[str, Any]] | None = None
    max_characters: int | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None


def offered_tools(definitions: list[JsonObject], referenced_names: set[str], warnings: Warnings) -> list[JsonObject]:
    """The tools in chat's form, in their order. Raises RequestError for one that is described badly.

    Tools that Anthropic's servers run are left out with a warning, and those with `defer_loading` until the result of
    a search names them (they are in `referenced_names`). Where that search is one of the servers', nothing is deferred.
    """
    tools: list[JsonObject] = []
    searched = not any(str(tool.get("type")).startswith(_SEARCH) for tool in definitions)
    for index, tool in enumerate(definitions):
        at = f"tools[{index}]"
        kind = tool.get("type")
        if searched and tool.get("defer_loading") is True and tool.get("name") not in referenced_names:
            continue
        family = _FAMILY.fullmatch(kind) if isinstance(kind, str) else None
        if kind in (None, "custom"):
            tools.append(_custom(convert_part(tool, Tool, at)))
        elif family is not None:
            tools.append(_own(convert_part(tool, OwnTool, at), family[1], family[2]))
        else:
            text = f"Tool '{tool.get('name', '')}' of type '{kind}' was not offered: this server does not run it."
            warnings.add(text, f"{at}.type")
    return tools


_SEARCH = "tool_search_tool"
_FAMILY = re.compile(r"(bash|text_editor|computer|memory)_(\d{8})")


def _custom(tool: Tool) -> JsonObject:
    return _function(tool.name, tool.description, tool.input_schema, tool.strict, tool.input_examples)


def _own(tool: OwnTool, family: str, version: str) -> JsonObject:
    match family:
        case "bash":
            name = "bash"
            text = _BASH
            schema = _object(_BASH_INPUT)
        case "memory":
            name = "memory"
            text = _MEMORY
            schema = _object(_MEMORY_INPUT, "command")
        case "text_editor":
            newer = version >= "20250429"
            name = "str_replace_based_edit_tool" if newer else "str_replace_editor"
            text = _EDITOR
            schema = _editor(newer)
            if tool.max_characters is not None:
                text += f" A view shows at most {tool.max_characters} characters."
        case _:
            actions = {"type": "string", "enum": [*_FIRST_ACTIONS, *(_ACTIONS if version >= "20250124" else ())]}
            name = "computer"
            schema = _object({"action": actions, **_COMPUTER_INPUT}, "action")
            text = f"{_COMPUTER} The display has {tool.display_width_px} x {tool.display_height_px} pixels."
    return _function(tool.name or name, text, schema, None, tool.input_examples)


def _function(
    name: str, description: str | None, schema: JsonObject, strict: bool | None, examples: list[JsonObject] | None
) -> JsonObject:
    if examples:
        inputs = "\n".join(msgspec.json.encode(example).decode() for example in examples)
        description = f"{description or ''}\n\nExamples of the input:\n{inputs}".lstrip()
    function = {"name": name, "description": description, "parameters": schema, "strict": strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT: JsonObject = {"type": "string"}
_NUMBER: JsonObject = {"type": "integer"}
_LINES: JsonObject = {"type": "array", "items": _NUMBER, "description": "The first and the last line; -1: the end."}
_POINT: JsonObject = {"type": "array", "items": _NUMBER, "description": "x and y in pixels."}


def _described(schema: JsonObject, description: str) -> JsonObject:
    return {**schema, "description": description}


_BASH = "Run a command in a bash session that keeps its state between calls."
_BASH_INPUT: JsonObject = {
    "command": _described(_TEXT, "The command to run; required unless 'restart' is true."),
    "restart": {"type": "boolean", "description": "True restarts the session."},
}
_EDITOR = "View, create and edit text files. A replaced text must occur exactly once in its file."
_MEMORY = "Read and write files of a memory folder, /memories, that lasts between conversations."
_MEMORY_INPUT: JsonObject = {
    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
    "path": _described(_TEXT, "A path below /memories; all commands but 'rename' need it."),
    "view_range": _LINES,
    "file_text": _described(_TEXT, "For 'create': the content."),
    "old_str": _described(_TEXT, "For 'str_replace': the text that is replaced."),
    "new_str": _described(_TEXT, "For 'str_replace': the new text."),
    "insert_line": _described(_NUMBER, "For 'insert': the line after which the text comes."),
    "insert_text": _described(_TEXT, "For 'insert': the text."),
    "old_path": _described(_TEXT, "For 'rename'."),
    "new_path": _described(_TEXT, "For 'rename'."),
}
_COMPUTER = "Use a computer's mouse, keyboard and screen."
_FIRST_ACTIONS = (
    *("key", "type", "cursor_position", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"),
    *("double_click", "screenshot"),
)
_ACTIONS = ("hold_key", "left_mouse_down", "left_mouse_up", "triple_click", "scroll", "wait")
_COMPUTER_INPUT: JsonObject = {
    "coordinate": _POINT,
    "start_coordinate": _described(_POINT, "For 'left_click_drag': where it begins."),
    "text": _described(_TEXT, "The text to type, or the keys."),
    "duration": {"type": "number", "description": "Seconds, for 'wait' and 'hold_key'."},
    "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
    "scroll_amount": _described(_NUMBER, "Clicks of the wheel."),
}


def _editor(newer: bool) -> JsonObject:
    """Older versions undo edits, and name the inserted text as the replacing one."""
    commands = ["view", "create", "str_replace", "insert", *([] if newer else ["undo_edit"])]
    inserted: JsonObject = {"insert_text": _described(_TEXT, "For 'insert': the text.")} if newer else {}
    properties: JsonObject = {
        "command": {"type": "string", "enum": commands},
        "path": _described(_TEXT, "The path of a file or folder."),
        "view_range": _LINES,
        "file_text": _described(_TEXT, "For 'create': the content."),
        "old_str": _described(_TEXT, "For 'str_replace': the text that is replaced."),
        "new_str": _described(_TEXT, "For 'str_replace': the new text." if newer else "The new or inserted text."),
        "insert_line": _described(_NUMBER, "For 'insert': the line after which the text comes."),
        **inserted,
    }
    return _object(properties, "command", "path")
