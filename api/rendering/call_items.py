"""Calls of tools as output items of /v1/responses, in the form of the tool that the model called."""

from __future__ import annotations

import json
from typing import Any, cast

from api.rendering.chunks import Event
from api.rendering.output_items import Item
from api.rendering.text_argument import TextArgument
from api.schemas.response_tools import OfferedTool


class Call(Item):
    """The call of a function; its arguments are JSON text."""

    kind = "function_call"
    prefix = "fc"

    def __init__(self, name: str, at: int, call_id: str, function: str, tool: OfferedTool | None) -> None:
        super().__init__(f"{self.prefix}_{name}", at)
        self._call_id = call_id
        self._name = tool.own if tool is not None else function
        self._namespace = {"namespace": tool.namespace} if tool is not None and tool.namespace else {}

    def shown(self, empty: bool = False) -> dict[str, Any]:
        item = {"id": self.identity, "type": self.kind, "status": self.status, "call_id": self._call_id}
        return item | self._body(empty)

    def _body(self, empty: bool) -> dict[str, Any]:
        return {"name": self._name, "arguments": "" if empty else self.text} | self._namespace

    def _delta(self, text: str, **more: Any) -> Event:
        return self._inner("response.function_call_arguments.delta", delta=text)

    def _closing(self) -> list[Event]:
        return [self._inner("response.function_call_arguments.done", name=self._name, arguments=self.text)]


class CustomCall(Call):
    """The call of a custom tool: the text of its one argument, as it comes."""

    kind = "custom_tool_call"
    prefix = "ctc"

    def __init__(self, name: str, at: int, call_id: str, function: str, tool: OfferedTool | None) -> None:
        super().__init__(name, at, call_id, function, tool)
        self._input = TextArgument("input")

    def grow(self, text: str, **more: Any) -> list[Event]:
        self._texts.append(text)
        return self._grown(self._input.push(text))

    def _body(self, empty: bool) -> dict[str, Any]:
        return {"name": self._name, "input": "" if empty else self._input.text} | self._namespace

    def _grown(self, text: str) -> list[Event]:
        return [self._inner("response.custom_tool_call_input.delta", delta=text)] if text else []

    def _closing(self) -> list[Event]:
        rest = self._grown(self._input.end())
        return [*rest, self._inner("response.custom_tool_call_input.done", input=self._input.text)]


class ActionCall(Call):
    """A call whose item has an object: it is told once it is complete."""

    def open(self) -> list[Event]:
        return []

    def grow(self, text: str, **more: Any) -> list[Event]:
        self._texts.append(text)
        return []

    def close(self, status: str) -> list[Event]:
        opened = super().open()
        return [*opened, *super().close(status)]

    def _closing(self) -> list[Event]:
        return []

    def _arguments(self) -> dict[str, Any]:
        try:
            argument = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return cast("dict[str, Any]", argument) if isinstance(argument, dict) else {}

    def _strings(self, name: str) -> list[str]:
        """A list of texts; a model may write one text in its place."""
        argument = self._arguments().get(name)
        if isinstance(argument, list):
            return [one if isinstance(one, str) else json.dumps(one) for one in cast("list[Any]", argument)]
        return [argument] if isinstance(argument, str) else []

    def _whole_number(self, name: str) -> int | None:
        argument = self._arguments().get(name)
        return argument if isinstance(argument, int) and not isinstance(argument, bool) else None


class LocalShellCall(ActionCall):
    kind = "local_shell_call"
    prefix = "lsh"

    def _body(self, empty: bool) -> dict[str, Any]:
        command = self._strings("command")
        directory = self._arguments().get("working_directory")
        action = {
            "type": "exec",
            "command": ["bash", "-lc", *command] if isinstance(self._arguments().get("command"), str) else command,
            "env": {},
            "timeout_ms": self._whole_number("timeout_ms"),
            "user": None,
            "working_directory": directory if isinstance(directory, str) else None,
        }
        return {"action": action}


class ShellCall(ActionCall):
    kind = "shell_call"
    prefix = "sh"

    def _body(self, empty: bool) -> dict[str, Any]:
        action = {
            "commands": self._strings("commands"),
            "timeout_ms": self._whole_number("timeout_ms"),
            "max_output_length": None,
        }
        return {"action": action, "environment": {"type": "local"}}

    def _closing(self) -> list[Event]:
        events: list[Event] = []
        for index, command in enumerate(self._strings("commands")):
            place = {"command_index": index}
            events += [
                self._event("response.shell_call_command.added", command="", **place),
                self._event("response.shell_call_command.delta", delta=command, **place),
                self._event("response.shell_call_command.done", command=command, **place),
            ]
        return events


class ApplyPatchCall(ActionCall):
    kind = "apply_patch_call"
    prefix = "apc"

    def _body(self, empty: bool) -> dict[str, Any]:
        argument = self._arguments()
        kind, path, diff = (argument.get(name) for name in ("type", "path", "diff"))
        operation = {
            "type": kind if kind in ("create_file", "delete_file") else "update_file",
            "path": path if isinstance(path, str) else "",
        }
        if kind != "delete_file":
            operation["diff"] = diff if isinstance(diff, str) else ""
        return {"operation": operation}


_KINDS: dict[str, type[Call]] = {
    "function": Call,
    "custom": CustomCall,
    "local_shell": LocalShellCall,
    "shell": ShellCall,
    "apply_patch": ApplyPatchCall,
}


def call_item(tool: OfferedTool | None, name: str, at: int, call_id: str, function: str) -> Call:
    """The item of a call; a function that is not among the tools is called as one."""
    return _KINDS[tool.kind if tool is not None else "function"](name, at, call_id, function, tool)
