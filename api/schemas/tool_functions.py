"""The function that each kind of tool of /v1/responses is for the model: description and parameters."""

from __future__ import annotations

from typing import Any

from api.schemas.chat import LARK
from api.schemas.decoding import missing
from control.errors import RequestError
from control.messages import Grammar
from control.text.grammar import as_lark


def function_of(kind: str, definition: dict[str, Any], place: str) -> dict[str, Any]:
    """Description, parameters and strictness. Raises RequestError for a custom tool's format that is not served."""
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    if kind == "custom":
        return _custom(definition, f"{place}.format")
    definition_fields = {name: definition.get(name) for name in ("description", "parameters", "strict")}
    return {name: value for name, value in definition_fields.items() if value is not None}


def _custom(definition: dict[str, Any], place: str) -> dict[str, Any]:
    """A function with one text. The prompt describes its grammar, because it can't be enforced everywhere."""
    form: Any = definition.get("format") or {"type": "text"}
    about = [str(definition["description"])] if definition.get("description") else []
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):  # type: ignore[misc]
        raise RequestError(f"'{place}.type' must be 'text' or 'grammar'.", param=f"{place}.type")
    value: dict[str, Any] = dict(_STRING)
    if form["type"] == "grammar":
        syntax: Any = form.get("syntax")  # type: ignore[misc]
        grammar: Any = form.get("definition")  # type: ignore[misc]
        if syntax not in ("lark", "regex"):
            raise RequestError(f"'{place}.syntax' must be 'lark' or 'regex'.", param=f"{place}.syntax")
        if not isinstance(grammar, str) or not grammar.strip():
            raise missing(f"{place}.definition")
        if syntax == "lark":
            value[LARK] = grammar
        else:  # the form of calls decides which of the two is used
            value |= {"pattern": f"^(?:{grammar})$", LARK: f"start: {as_lark(Grammar('regex', grammar))}"}
        about.append(f"'input' must match this {'Lark grammar' if syntax == 'lark' else 'regex'}:\n{grammar}")
    function: dict[str, Any] = {"parameters": _object(["input"], {"input": value})}
    if about:
        function["description"] = "\n\n".join(about)
    return function | ({"strict": True} if len(value) > 1 else {})


def _object(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_STRING = {"type": "string"}
_STRINGS = {"type": "array", "items": _STRING}
_MILLISECONDS = {"type": "integer", "description": "Milliseconds after which the command is ended."}

BUILT_IN: dict[str, dict[str, Any]] = {
    "local_shell": {
        "description": "Runs a command on the user's machine.",
        "parameters": _object(
            ["command"],
            {
                "command": {**_STRINGS, "description": "The program and its arguments."},
                "working_directory": _STRING,
                "timeout_ms": _MILLISECONDS,
            },
        ),
    },
    "shell": {
        "description": "Runs shell commands on the user's machine, one after the other.",
        "parameters": _object(["commands"], {"commands": _STRINGS, "timeout_ms": _MILLISECONDS}),
    },
    "apply_patch": {
        "description": "Creates, updates or deletes one file.",
        "parameters": _object(
            ["type", "path"],
            {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": _STRING,
                "diff": {
                    "type": "string",
                    "description": "The change in the V4A diff format, each line with '+', '-' or ' ' in front; "
                    "left out for delete_file.",
                },
            },
        ),
    },
}
