"""The tools of /v1/responses as functions that a model may call: custom tools, namespaces, shells and patches.

`extra_fields["tools"]` of a request's view has the tools that are offered, so the answer is rendered by the same table.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from api.schemas.chat import LARK, MAX_TOOLS
from api.schemas.decoding import missing
from api.schemas.escaped_lark import in_json_string
from control.errors import RequestError
from control.messages import Grammar
from control.text.grammar import as_lark

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]
Definition = dict[str, Any]

_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "mcp", "image_generation", "computer", "tool_search"),
    "programmatic_tool_calling",
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:/-]")
_NAME_CHARACTERS = 128
_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """One offered function, and the tool of the request that it represents."""

    kind: Kind
    name: str
    """The name that the model sees."""
    own: str
    """The name that the client gave, or the tool's type where it has none."""
    namespace: str | None
    place: str
    definition: Definition

    @property
    def function(self) -> dict[str, Any]:
        """The function in the form of chat completions."""
        function = function_of(self.kind, self.definition, self.place)
        return {"type": "function", "function": {"name": self.name} | function}


@dataclass(slots=True)
class ResponseTools:
    """The tools of one request; `hosted` are the places and types of those that are left out."""

    offered: list[OfferedTool] = field(default_factory=list[OfferedTool])
    hosted: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    definitions: list[Definition] = field(default_factory=list[Definition])
    """The definitions of the tools that are offered."""

    @property
    def names(self) -> dict[str, str]:
        """Patterns for the places of functions in chat's form, and the places of their tools."""
        return {rf"^tools\[{index}\](\.function)?": tool.place for index, tool in enumerate(self.offered)}

    def find(self, kind: str, own: str, namespace: str | None = None) -> OfferedTool | None:
        for tool in self.offered:
            if tool.kind == kind and own in (tool.own, tool.name) and namespace in (None, tool.namespace):
                return tool
        return None


def unenforced(tools: list[Definition], written: bool) -> list[tuple[str, str]]:
    """Warnings about grammars that can't be enforced in the form in which the model writes calls. `written`: it writes
    a text as it is, not inside JSON."""
    warnings: list[tuple[str, str]] = []
    for tool in read_tools(tools).offered if not written else []:
        grammar = _grammar(tool)
        if grammar.get("syntax") == "lark" and in_json_string(str(grammar.get("definition"))) is None:
            place = f"{tool.place}.format"
            text = f"'{place}' is told to this model, but can't be enforced inside the JSON of its calls."
            warnings.append((text, place))
    return warnings


def is_hosted(kind: str) -> bool:
    """True for tools that OpenAI's servers run, in any of their versions."""
    return any(kind == hosted or kind.startswith(f"{hosted}_") for hosted in _HOSTED)


def read_tools(tools: list[Definition]) -> ResponseTools:
    """Raises RequestError for a tool of a type that is not known, or without what its type needs."""
    response_tools = ResponseTools()
    if len(tools) > MAX_TOOLS:
        raise _too_many("tools", len(tools))
    names = {str(tool.get("name")) for tool in tools if tool.get("type") in ("function", "custom")}
    for index, tool in enumerate(tools):
        _read(tool, f"tools[{index}]", names, response_tools)
    grammars = [_grammar(tool) for tool in response_tools.offered]
    if sum(len(str(grammar.get("definition", ""))) for grammar in grammars) > _GRAMMAR_CHARACTERS:
        raise RequestError(
            f"The grammars of 'tools' have more than {_GRAMMAR_CHARACTERS} characters together.", param="tools"
        )
    return response_tools


def _grammar(tool: OfferedTool) -> Definition:
    """The format of a custom tool; empty for others."""
    form: Any = tool.definition.get("format") if tool.kind == "custom" else None
    return cast(Definition, form) if isinstance(form, dict) else {}


def _read(tool: Definition, place: str, names: set[str], response_tools: ResponseTools) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise missing(f"{place}.type")
    if is_hosted(kind) or (kind == "shell" and _runs_here(tool)):
        response_tools.hosted.append((place, kind))
        return
    if kind == "namespace":
        _read_namespace(tool, place, names, response_tools)
    elif kind in ("function", "custom"):
        own = _name_of(tool, place)
        response_tools.offered.append(OfferedTool(cast(Kind, kind), own, own, None, place, tool))
    elif kind in BUILT_IN:
        response_tools.offered.append(OfferedTool(cast(Kind, kind), _unique(kind, names), kind, None, place, tool))
    else:
        raise RequestError(
            f"'{place}' has type {kind[:80]!r}; this server offers tools of the types 'function', 'custom', "
            "'namespace', 'local_shell', 'shell' and 'apply_patch'.",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    response_tools.definitions.append(tool)


def _read_namespace(tool: Definition, place: str, names: set[str], response_tools: ResponseTools) -> None:
    """Each tool of a namespace is a function `<namespace>__<name>`."""
    namespace = _name_of(tool, place)
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise missing(f"{place}.tools")
    if len(inner) + len(response_tools.offered) > MAX_TOOLS:  # type: ignore[misc]
        raise _too_many(f"{place}.tools", len(inner) + len(response_tools.offered))  # type: ignore[misc]
    for index, entry in enumerate(cast("list[Any]", inner)):
        at = f"{place}.tools[{index}]"
        if not isinstance(entry, dict) or entry.get("type", "function") not in ("function", "custom"):  # type: ignore[misc]
            raise RequestError(f"'{at}' must be a tool of type 'function' or 'custom'.", param=f"{at}.type")
        definition = cast(Definition, entry)
        own = _name_of(definition, at)
        about = "\n".join(text for text in (tool.get("description"), definition.get("description")) if text)
        if index == 0 and about:  # the namespace is described once
            definition = {**definition, "description": about}
        name = _unique(qualified(namespace, own), names)
        response_tools.offered.append(
            OfferedTool(cast(Kind, definition.get("type", "function")), name, own, namespace, at, definition)
        )


def _too_many(place: str, count: int) -> RequestError:
    return RequestError(
        f"'tools' has {count} entries, those of namespaces counted; at most {MAX_TOOLS} are served.", param=place
    )


def qualified(namespace: str | None, name: str) -> str:
    """The name of a namespace's tool as the model sees it."""
    if not namespace:
        return name
    return _NOT_IN_NAMES.sub("_", f"{namespace.removesuffix('__')}__{name}")


def _unique(name: str, names: set[str]) -> str:
    if len(name) > _NAME_CHARACTERS:
        name = f"{name[: _NAME_CHARACTERS - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    unique = name
    count = 1
    while unique in names:
        count += 1
        unique = f"{name[: _NAME_CHARACTERS - 4]}_{count}"
    names.add(unique)
    return unique


def _name_of(tool: Definition, place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise missing(f"{place}.name")
    return name


def _runs_here(tool: Definition) -> bool:
    """True for a shell in a container of the server's."""
    environment = tool.get("environment")
    return isinstance(environment, dict) and cast(Definition, environment).get("type") != "local"


def choice_of(choice: str | dict[str, Any] | None, tools: ResponseTools) -> Any:
    """`tool_choice` in the form of chat completions. Raises RequestError where it demands what is not offered."""
    if not isinstance(choice, dict):
        if choice == "required" and tools.hosted and not tools.offered:
            raise _demanded(tools.hosted[0][1])
        return choice if tools.offered or not tools.hosted else None
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, tools)
    if choice.get("type") == "namespace":
        inner = [tool for tool in tools.offered if tool.namespace == choice.get("name")]
        if not inner:
            raise _unknown(choice, "tool_choice")
        return _allowed_tools("required", [_by_name(tool) for tool in inner])
    return _function_choice(choice, tools, "tool_choice")


def _allowed(choice: dict[str, Any], tools: ResponseTools) -> Any:
    listed = choice.get("tools")
    entries = [
        entry for entry in cast("list[Any]", listed if isinstance(listed, list) else []) if isinstance(entry, dict)
    ]
    served = [entry for entry in entries if not is_hosted(str(entry.get("type")))]
    if entries and not served:
        if choice.get("mode") == "required":
            raise _demanded(str(entries[0].get("type")))
        return "none"
    functions = [_function_choice(entry, tools, f"tool_choice.tools[{entries.index(entry)}]") for entry in served]
    return _allowed_tools(choice.get("mode"), functions)


def _allowed_tools(mode: Any, functions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def _function_choice(choice: dict[str, Any], tools: ResponseTools, place: str) -> dict[str, Any]:
    kind = str(choice.get("type"))
    if is_hosted(kind):
        raise _demanded(kind)
    if kind not in ("function", "custom", *BUILT_IN):
        raise RequestError(
            f"'{place}' has type {kind[:80]!r}; use 'function', 'custom', 'namespace', 'local_shell', 'shell', "
            "'apply_patch' or 'allowed_tools'.",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    own = kind if kind in BUILT_IN else str(choice.get("name"))
    tool = tools.find(kind, own, choice.get("namespace"))
    if tool is None:
        raise _unknown(choice, place)
    return _by_name(tool)


def _by_name(tool: OfferedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _unknown(choice: dict[str, Any], place: str) -> RequestError:
    name = choice.get("name") or choice.get("type")
    return RequestError(f"'{place}' names {str(name)[:80]!r}, which is not among 'tools'.", param=f"{place}.name")


def _demanded(kind: str) -> RequestError:
    return RequestError(
        f"'tool_choice' demands a tool of type {kind[:80]!r}, which a server would have to run; this one runs no "
        "tools. Set 'tool_choice' to \"auto\".",
        param="tool_choice",
        code="unsupported_parameter",
    )


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
