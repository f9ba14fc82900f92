"""Content blocks of /v1/messages, and the chat's messages that they stand for."""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.refusals import missing
from control.errors import RequestError


class Block(msgspec.Struct, kw_only=True):
    """One block of any type. Types that are not served are refused by name, so their fields are known."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: str | None = None
    source: Any = None
    title: str | None = None
    context: str | None = None
    data: Any = None
    file_id: str | None = None
    transformations: Any = None
    tool_name: str | None = None
    tabs: Any = None
    state_changes: Any = None


def chat_messages(role: str, content: str | list[Block], at: str) -> list[dict[str, Any]]:
    """The chat's messages of one turn: results of tools first, each one a message. Raises RequestError for a block."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content and role != "assistant":
        raise RequestError(f"'{at}.content' is empty; send at least one block.", param=f"{at}.content")
    if role == "assistant":
        return [_assistant(content, at)]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        here = f"{at}.content[{index}]"
        if block.type == "tool_result" and role == "user":
            results.append(_result(block, here))
        elif block.type == "text":
            texts.append(text_of(block, here))
        else:
            raise refuse_block(block, here)
    return [*results, {"role": role, "content": "\n".join(texts)}] if texts else results


def _assistant(content: list[Block], at: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    for index, block in enumerate(content):
        here = f"{at}.content[{index}]"
        if block.type == "text":
            message["content"] = message.get("content", "") + text_of(block, here)
        elif block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": _given(block.name, f"{here}.name"), "arguments": arguments}
            call = {"id": _given(block.id, f"{here}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise refuse_block(block, here)
    return message


def _result(block: Block, at: str) -> dict[str, Any]:
    identity = _given(block.tool_use_id, f"{at}.tool_use_id")
    if block.content is None or isinstance(block.content, str):
        text: str = block.content or ""
    else:
        parts = msgspec.convert(block.content, list[dict[str, Any]])
        texts: list[str] = []
        for index, part in enumerate(parts):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise refuse_block(Block(type=str(part.get("type"))), f"{at}.content[{index}]")
            texts.append(part["text"])
        text = "\n".join(texts)
    # Templates have no place for it, and a model must know that a call has failed.
    return {"role": "tool", "tool_call_id": identity, "content": f"Error: {text}" if block.is_error else text}


def text_of(block: Block, at: str) -> str:
    return _given(block.text, f"{at}.text")


def _given(value: str | None, at: str) -> str:
    if value is None:
        raise missing(at)
    return value


def refuse_block(block: Block, at: str) -> RequestError:
    return RequestError(
        f"'{at}' has type '{block.type}'; this model takes text, thinking, tool_use and tool_result blocks where they "
        "belong.",
        param=f"{at}.type",
        code="unsupported_content",
    )
