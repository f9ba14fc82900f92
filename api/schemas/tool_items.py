"""Calls of tools and their results as items of /v1/responses, and each as a function's call and result."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import msgspec

from api.schemas.response_tools import qualified

Item = dict[str, Any]

CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
RESULTS = tuple(f"{kind}_output" for kind in CALLS)
_NOT_SERVED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
    *("computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "program", "program_output"),
)
"""Items of hosted tools: what they found is in the assistant's text that follows them."""


class CustomToolCall(msgspec.Struct, kw_only=True):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    namespace: str | None = None


class LocalShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(msgspec.Struct, kw_only=True):
    type: Literal["local_shell_call"]
    action: LocalShellAction
    call_id: str | None = None
    id: str | None = None


class LocalShellCallOutput(msgspec.Struct, kw_only=True):
    """`id` is that of the call where there is no `call_id`."""

    type: Literal["local_shell_call_output"]
    output: str
    id: str | None = None
    call_id: str | None = None


class ShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, kw_only=True):
    type: Literal["shell_call"]
    call_id: str
    action: ShellAction
    id: str | None = None


class ShellOutcome(msgspec.Struct, kw_only=True):
    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(msgspec.Struct, kw_only=True):
    stdout: str = ""
    stderr: str = ""
    outcome: ShellOutcome | None = None


class ShellCallOutput(msgspec.Struct, kw_only=True):
    type: Literal["shell_call_output"]
    call_id: str
    output: str | list[ShellOutput]
    id: str | None = None


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCall(msgspec.Struct, kw_only=True):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: PatchOperation
    id: str | None = None


class ApplyPatchCallOutput(msgspec.Struct, kw_only=True):
    type: Literal["apply_patch_call_output"]
    call_id: str
    status: Literal["completed", "failed"] = "completed"
    output: str | None = None
    id: str | None = None


ToolItem = (
    CustomToolCall
    | LocalShellCall
    | LocalShellCallOutput
    | ShellCall
    | ShellCallOutput
    | ApplyPatchCall
    | ApplyPatchCallOutput
)
KINDS: dict[str, type[ToolItem]] = {
    "custom_tool_call": CustomToolCall,
    "local_shell_call": LocalShellCall,
    "local_shell_call_output": LocalShellCallOutput,
    "shell_call": ShellCall,
    "shell_call_output": ShellCallOutput,
    "apply_patch_call": ApplyPatchCall,
    "apply_patch_call_output": ApplyPatchCallOutput,
}
_PREFIXES = {
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
}


def is_left_out(kind: str) -> bool:
    """True for items of tools that a server ran: they are no part of the prompt."""
    return kind in _NOT_SERVED


def kept_form(item: ToolItem, name: str) -> Item:
    """The item as it is stored; `name` identifies one without an id."""
    fields = {key: value for key, value in msgspec.to_builtins(item).items() if value is not None}
    status = {"status": "completed"} | ({"status": item.status} if isinstance(item, ApplyPatchCallOutput) else {})
    stored: Item = {"id": f"{_PREFIXES[item.type]}_{name}"} | fields | status
    if isinstance(item, LocalShellCall | LocalShellCallOutput):
        stored["call_id"] = item.call_id or stored["id"]
    if isinstance(item, LocalShellCall):
        stored["action"] = {"type": "exec", "env": {}} | stored["action"]
    return stored


def call_of(item: Item) -> tuple[str, str]:
    """Name and arguments, as JSON text, of the function that the item calls."""
    match item["type"]:
        case "function_call":
            return qualified(item.get("namespace"), item["name"]), item["arguments"]
        case "custom_tool_call":
            return qualified(item.get("namespace"), item["name"]), _text({"input": item["input"]})
        case "apply_patch_call":
            return "apply_patch", _text(item["operation"])
        case kind:
            left_out = ("type", "env", "user", "max_output_length")
            action = {name: value for name, value in item["action"].items() if value and name not in left_out}
            return kind.removesuffix("_call"), _text(action)


def result_of(item: Item) -> str:
    """The text of a call's result for the model."""
    output = item.get("output")
    if item["type"] == "apply_patch_call_output":
        return output or item["status"]
    if not isinstance(output, list):
        return str(output)
    return "\n".join(_shown(one) for one in cast("list[Item]", output))


def _shown(output: Item) -> str:
    outcome = output.get("outcome") or {}
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
    return "\n".join(text.rstrip("\n") for text in (ended, output["stdout"], output["stderr"]) if text)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
