"""Content blocks of /v1/messages, and the chat's messages that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from api.schemas.decoding import Warnings, convert_part, missing
from api.schemas.image_parts import Parts, chat_content, image_part, text_part
from control.errors import RequestError


class Block(msgspec.Struct, kw_only=True):
    """One block of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None


class Source(msgspec.Struct, kw_only=True):
    """The source of a document or of an image."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None
    url: str | None = None


_SILENT = ("redacted_thinking", "fallback", "mcp_tool_listing")
"""Blocks that say nothing to a model that did not write them."""
_DROPPED = ("container_upload", "tool_addition", "tool_removal")
"""Blocks that ask for something which is not done."""


def referenced(blocks: list[Block]) -> set[str]:
    """The names of the tools that the results of searches tell the model of."""
    tool_names: set[str] = set()
    for block in blocks:
        parts = cast(list[Any], block.content) if isinstance(block.content, list) else []
        for part in parts:
            if isinstance(part, dict) and cast(dict[str, Any], part).get("type") == "tool_reference":
                tool_names.add(str(cast(dict[str, Any], part).get("tool_name")))
    return tool_names


def chat_messages(role: str, content: str | list[Block], at: str, warnings: Warnings) -> list[dict[str, Any]]:
    """The chat's messages of one turn: results of tools first, each one a message. Raises RequestError for a block."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content and role != "assistant":
        raise RequestError(f"'{at}.content' is empty; send at least one block.", param=f"{at}.content")
    blocks = [(block, f"{at}.content[{index}]") for index, block in enumerate(content)]
    blocks = [(block, here) for block, here in blocks if not _left_out(block, here, warnings)]
    if role == "assistant":
        return [_assistant(blocks)]
    results = [_result(block, here) for block, here in blocks if block.type == "tool_result" and role == "user"]
    others = [(block, here) for block, here in blocks if block.type != "tool_result" or role != "user"]
    parts = [_part(block, here) if role == "user" else text_part(text_of(block, here)) for block, here in others]
    return [*results, {"role": role, "content": chat_content(parts)}] if parts else results


def _left_out(block: Block, at: str, warnings: Warnings) -> bool:
    if block.type in _DROPPED:
        warnings.add(f"'{at}' was left out: blocks of type '{block.type}' have no effect here.", f"{at}.type")
    return block.type in _SILENT or block.type in _DROPPED


def _assistant(blocks: list[tuple[Block, str]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    for block, here in blocks:
        if block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": _given(block.name, f"{here}.name"), "arguments": arguments}
            call = {"id": _given(block.id, f"{here}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif block.type in ("server_tool_use", "mcp_tool_use"):
            arguments = msgspec.json.encode(block.input or {}).decode()
            message["content"] = _line(message, f"[{block.name} {arguments}]")
        elif block.type.endswith("_tool_result"):
            message["content"] = _line(message, f"[result: {_readable(block.content)}]")
        else:
            message["content"] = message.get("content", "") + text_of(block, here)
    if len(message) == 1:
        message["content"] = ""
    return message


def _line(message: dict[str, Any], text: str) -> str:
    """The content with a line of its own for what a server's tool did in an earlier answer."""
    said: str = message.get("content", "")
    return f"{said}{'' if not said or said.endswith(chr(10)) else chr(10)}{text}\n"


_SHOWN = ("title", "url", "text", "stdout", "stderr", "data", "error_code")


def _readable(content: Any, levels: int = 8) -> str:
    """The texts of a result of a server's tool, in their order; encrypted parts have none."""
    if isinstance(content, str):
        return content
    if levels == 0 or not isinstance(content, list | dict):
        return ""
    if isinstance(content, list):
        return "\n".join(filter(None, (_readable(one, levels - 1) for one in cast(list[Any], content))))
    members = cast(dict[str, Any], content)
    texts = [members[name] for name in _SHOWN if isinstance(members.get(name), str) and members[name]]
    inner = [members[name] for name in ("content", "source") if isinstance(members.get(name), list | dict)]
    return "\n".join([*texts, *filter(None, (_readable(one, levels - 1) for one in inner))])


def _result(block: Block, at: str) -> dict[str, Any]:
    identity = _given(block.tool_use_id, f"{at}.tool_use_id")
    if block.content is None or isinstance(block.content, str):
        parts: Parts = [text_part(block.content or "")]
    else:
        blocks = convert_part(block.content, list[Block], f"{at}.content")
        parts = [_part(part, f"{at}.content[{index}]") for index, part in enumerate(blocks)]
    content = chat_content(parts)
    if block.is_error:
        # Templates have no place for it, and a model must know that a call has failed.
        content = f"Error: {content}" if isinstance(content, str) else [text_part("Error: "), *content]
    return {"role": "tool", "tool_call_id": identity, "content": content}


def _part(block: Block, at: str) -> dict[str, Any]:
    """The chat's part for a block. Raises RequestError for a block that is neither text nor an image."""
    return _image(block, at) if block.type == "image" else text_part(text_of(block, at))


def _image(block: Block, at: str) -> dict[str, Any]:
    """The type that the client names is not passed on: the data show what they are."""
    at = f"{at}.source"
    source = convert_part(block.source, Source, at)
    if source.type == "base64":
        return image_part(f"data:;base64,{_given(source.data, f'{at}.data')}", f"{at}.data")
    if source.type == "url":
        return image_part(_given(source.url, f"{at}.url"), f"{at}.url")
    raise RequestError(
        f"'{at}' has type '{source.type[:80]}'; images come with the type 'base64' or 'url', as this server keeps no "
        "files.",
        param=f"{at}.type",
        code="unsupported_content",
    )


def text_of(block: Block, at: str) -> str:
    """The text that a block says to the model. Raises RequestError for a block that is no text."""
    read = _TEXTS.get(block.type)
    if read is None:
        raise _unserved(block.type, at)
    return read(block, at)


def _unserved(kind: str, at: str) -> RequestError:
    return RequestError(
        f"'{at}' has type '{kind[:80]}'; served are text, images of users and of results, and thinking, tool_use and "
        "tool_result blocks where they belong.",
        param=f"{at}.type",
        code="unsupported_content",
    )


def _document(block: Block, at: str) -> str:
    source = convert_part(block.source, Source, f"{at}.source")
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        inner = source.content
        text = inner if isinstance(inner, str) else _plain(inner, f"{at}.source.content")
    else:
        raise RequestError(
            f"'{at}.source' has type '{source.type[:80]}'; this model takes documents of plain text. Send the "
            "document's text, with the type 'text' and 'data'.",
            param=f"{at}.source.type",
            code="unsupported_content",
        )
    return _tagged("document", [("title", block.title), ("context", block.context)], text)


def _search_result(block: Block, at: str) -> str:
    text = _plain(convert_part(block.content or [], list[Block], f"{at}.content"), f"{at}.content")
    source = block.source if isinstance(block.source, str) else None
    return _tagged("search_result", [("title", block.title), ("source", source)], text)


def _plain(blocks: list[Block], at: str) -> str:
    """The texts of blocks that must be text: what is inside of a document holds no other one."""
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unserved(block.type, f"{at}[{index}]")
    return "\n".join(_given(block.text, f"{at}[{index}].text") for index, block in enumerate(blocks))


def _tagged(tag: str, facts: list[tuple[str, str | None]], text: str) -> str:
    elements = "".join(f"<{name}>{value}</{name}>\n" for name, value in facts if value)
    return f"<{tag}>\n{elements}{text}\n</{tag}>"


def _given(value: str | None, at: str) -> str:
    if value is None:
        raise missing(at)
    return value


_TEXTS: dict[str, Callable[[Block, str], str]] = {
    "text": lambda block, at: _given(block.text, f"{at}.text"),
    "document": _document,
    "search_result": _search_result,
    "compaction": lambda block, at: block.content if isinstance(block.content, str) else "",
    "tool_reference": lambda block, at: _given(block.tool_name, f"{at}.tool_name"),
}
"""The text of a block, by its type."""
