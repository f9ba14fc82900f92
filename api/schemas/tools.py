"""`tools` and `tool_choice`: the functions that a request offers to the model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from control.errors import RequestError

MAX_TOOLS = 1_024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
LARK = "x-lark"
"""The keyword of a function's text parameter whose value is a Lark grammar."""


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Other types of tools are refused by name."""

    type: str = "function"
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class ToolName(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolName]


class NamedTool(ToolName, kw_only=True):
    """One function that must be called, or with type `allowed_tools` those that may be."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that the model may call."""

    functions: list[Function]
    must: bool = False
    """True if it has to call one of them."""
    named: bool = False
    """True if the client named the one that has to be called."""
    single: bool = False
    """True if only one call is wanted."""

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As templates expect tools: OpenAI's form, with what models are trained on and no more."""
        return [{"type": "function", "function": _described(function)} for function in self.functions]


def _described(function: Function) -> dict[str, Any]:
    description = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **description, "parameters": function.parameters or _NO_PARAMETERS}


def check_tools(tools: list[Tool]) -> None:
    """Raise RequestError for the first tool that is not served, or is described badly."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"'tools' has {len(tools)} entries; at most {MAX_TOOLS} are served.", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        name = _function(tool, path).name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"Invalid '{path}.function.name': {name[:80]!r} must be 1 to 128 letters, digits or any of '_.:/-'.",
                param=f"{path}.function.name",
            )
        if name in seen:
            raise RequestError(f"'{path}.function.name': {name!r} is there twice.", param=f"{path}.function.name")
        seen.add(name)
        if wrong := _wrong_schema(cast(Function, tool.function).parameters or _NO_PARAMETERS):
            raise RequestError(
                f"Invalid schema for function {name!r}: {wrong}.",
                param=f"{path}.function.parameters",
                code="invalid_function_parameters",
            )


def _wrong_schema(parameters: dict[str, Any]) -> str | None:
    """The reason why a schema can't describe a function's parameters; None for a valid one."""
    kind, properties, required = (parameters.get(name) for name in ("type", "properties", "required"))
    if kind not in (None, "object"):
        return f"'parameters' must have the type 'object', not {kind!r:.80}"
    if properties is not None and not isinstance(properties, dict):
        return "'properties' must be an object"
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):  # type: ignore[misc]
        return "'required' must be a list of names"
    return None


def _function(tool: Tool, path: str) -> Function:
    if tool.type != "function":
        raise RequestError(
            f"'{path}' has type {tool.type[:80]!r}; this server takes tools of type 'function' only.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if tool.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    return tool.function


def offered(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Offer | None:
    """The functions that the model may call, or None. Raises RequestError for a choice that checked `tools` forbid."""
    functions = [tool.function for tool in tools or [] if tool.function is not None]
    if not functions and (choice == "required" or isinstance(choice, NamedTool)):
        raise RequestError("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if not functions or choice == "none":
        return None
    single = parallel is False
    if not isinstance(choice, NamedTool):
        return Offer(functions, must=choice == "required", single=single)
    if choice.type != "allowed_tools":
        return Offer([_named(choice, functions, "tool_choice")], must=True, named=True, single=True)
    if choice.allowed_tools is None or not choice.allowed_tools.tools:
        raise RequestError("'tool_choice.allowed_tools.tools' names no tool.", param="tool_choice.allowed_tools.tools")
    allowed = [
        _named(tool, functions, f"tool_choice.allowed_tools.tools[{index}]")
        for index, tool in enumerate(choice.allowed_tools.tools)
    ]
    return Offer(allowed, must=choice.allowed_tools.mode == "required", single=single)


def _named(tool: ToolName, functions: list[Function], path: str) -> Function:
    if tool.type != "function":
        raise RequestError(f"'{path}' must be of type 'function', not {tool.type[:80]!r}.", param=f"{path}.type")
    if tool.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    name = tool.function.name
    found = next((function for function in functions if function.name == name), None)
    if found is None:
        raise RequestError(f"'{path}' names {name[:80]!r}, which is not among 'tools'.", param=f"{path}.function.name")
    return found
