"""OpenAI's older names of tools: `functions` and `function_call` in a request, `function_call` in messages."""

from __future__ import annotations

from typing import Literal

from api.schemas.naming import Names
from api.schemas.tools import Function, FunctionName, NamedTool, Tool, ToolChoice
from control.errors import RequestError

FunctionCall = Literal["none", "auto"] | FunctionName

FUNCTION_NAMES: Names = {
    r"^tools\[(\d+)\]\.function": r"functions[\1]",
    r"^tools\b": "functions",
    r"^tool_choice(\.function)?": "function_call",
}


def tools_of(functions: list[Function]) -> list[Tool]:
    return [Tool(function=function) for function in functions]


def choice_of(call: FunctionCall | None) -> ToolChoice | None:
    """The `tool_choice` that a `function_call` stands for."""
    return NamedTool(function=call) if isinstance(call, FunctionName) else call


def check_functions(
    functions: list[Function] | None, call: FunctionCall | None, tools: list[Tool] | None, choice: ToolChoice | None
) -> None:
    """Raise RequestError where the two forms are mixed, or a call is demanded without functions."""
    for name, given in (("tools", tools), ("tool_choice", choice if choice != "auto" else None)):
        if functions and given:
            raise RequestError(
                f"'functions' and '{name}' are both set. Send 'tools' and 'tool_choice', or the older 'functions' and "
                "'function_call'.",
                param=name,
            )
    if isinstance(call, FunctionName) and not functions:
        raise RequestError(
            "'function_call' names a function, but there are no 'functions'. Send them, or use 'tool_choice' with "
            "'tools'.",
            param="function_call",
        )
