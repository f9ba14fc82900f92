"""The items of /v1/responses: read strictly, kept in one form, and turned into a chat's messages.

The kept form is that of the answer's own items, so a stored conversation is input items and output items in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from api.schemas.decoding import Warnings, convert_part
from api.schemas.item_parts import Content, Part, chat_parts, is_of_parts, kept_output, kept_parts, text_part, texts_of
from api.schemas.tool_items import CALLS, KINDS, RESULTS, Item, ToolItem, call_of, is_left_out, kept_form, result_of
from control.errors import RequestError

Unseal = Callable[[str, str], str | None]
"""From an item's type and its `encrypted_content` to the text; None for one that this farm did not seal."""

MAX_ITEMS = 4096

_SUMMARY = "Summary of the conversation so far:"
_SUMMARISE = (
    "Write a summary of our conversation so far, which will take its place. Say what was asked, what was decided and "
    "why, what was done and found, with names, paths, numbers and commands as they are, and what is still to do. "
    "Write the summary only."
)


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None
    caller: Any = None


class FunctionCallOutput(msgspec.Struct, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class Reasoning(msgspec.Struct, kw_only=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Part] = []
    content: list[Part] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class Compaction(msgspec.Struct, kw_only=True):
    """The summary that POST /v1/responses/compact made, sealed."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str
    id: str | None = None


class CompactionTrigger(msgspec.Struct, kw_only=True):
    """Asks, as the last item, for a summary of the conversation."""

    type: Literal["compaction_trigger"]
    id: str | None = None


class Reference(msgspec.Struct, kw_only=True):
    """Stands for an item of a stored response."""

    id: str
    type: Literal["item_reference"] | None = "item_reference"


_Kind = Message | FunctionCall | FunctionCallOutput | Reasoning | Compaction | CompactionTrigger | Reference
_KINDS: dict[str, type[_Kind | ToolItem]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "compaction": Compaction,
    "compaction_summary": Compaction,
    "compaction_trigger": CompactionTrigger,
    "item_reference": Reference,
    **KINDS,
}


def read_items(
    source: str | list[dict[str, Any]] | None,
    rid: str,
    warnings: Warnings | None = None,
    unseal: Unseal | None = None,
) -> list[Item]:
    """The input in the kept form; `rid` names items without an id. Raises RequestError for what is not served."""
    if source is None:
        return []
    rows = [{"role": "user", "content": source}] if isinstance(source, str) else source
    if len(rows) > MAX_ITEMS:
        raise RequestError(f"'input' has {len(rows)} items; at most {MAX_ITEMS} are served.", param="input")
    reader = _Reader(warnings or Warnings(), unseal)
    read = [reader.read(row, f"input[{index}]", f"{rid}_in{index}") for index, row in enumerate(rows)]
    return [item for item in read if item is not None]


class _Reader:
    """Reads single items; one that is no part of the prompt is left out with a warning."""

    def __init__(self, warnings: Warnings, unseal: Unseal | None) -> None:
        self._warnings = warnings
        self._unseal = unseal

    def read(self, row: dict[str, Any], at: str, name: str) -> Item | None:
        kind = row.get("type") or ("message" if "role" in row else "item_reference")
        if is_left_out(kind):
            self._warnings.add(f"'{at}' has type '{kind}', of a tool that this server does not run; left out.", at)
            return None
        if kind not in _KINDS:
            raise RequestError(
                f"'{at}' has type {kind!r}; this server takes {', '.join(_KINDS)}.",
                param=f"{at}.type",
                code="unsupported_content",
            )
        item = convert_part(row, _KINDS[kind], at)
        match item:
            case Message():
                content = kept_parts(item.content, f"{at}.content", item.role)
                return _item(item.id or f"msg_{name}", "message", role=item.role, content=content)
            case FunctionCall():
                fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
                fields |= {"namespace": item.namespace} if item.namespace else {}
                return _item(item.id or f"fc_{name}", "function_call", **fields)
            case FunctionCallOutput():
                output = kept_output(item.output, f"{at}.output")
                begins = "fco" if item.type == "function_call_output" else "ctco"
                return _item(item.id or f"{begins}_{name}", item.type, call_id=item.call_id, output=output)
            case Reasoning():
                return self._reasoning(item, at, item.id or f"rs_{name}")
            case Compaction():
                text = self._opened(item, at)
                return None if text is None else _summary(item.id or f"cmp_{name}", item.encrypted_content, text)
            case CompactionTrigger():
                return trigger(item.id or f"cmt_{name}")
            case Reference():
                return {"id": item.id, "type": "item_reference"}
            case _:
                return kept_form(item, name)

    def _reasoning(self, item: Reasoning, at: str, identity: str) -> Item | None:
        content = texts_of(item.content or [], f"{at}.content")
        summary = texts_of(item.summary, f"{at}.summary")
        if not content and item.encrypted_content:
            text = self._opened(item, at)
            content = [] if text is None else [text]
            if not content and not summary:
                return None
        texts = {"summary": [text_part("summary_text", text) for text in summary]}
        if content:
            texts["content"] = [text_part("reasoning_text", text) for text in content]
        return _item(identity, "reasoning", **texts)

    def _opened(self, item: Reasoning | Compaction, at: str) -> str | None:
        """The sealed text. A foreign seal must not end a conversation, so it only warns."""
        kind = "compaction" if isinstance(item, Compaction) else "reasoning"
        text = self._unseal(kind, item.encrypted_content or "") if self._unseal is not None else None
        if text is None:
            self._warnings.add(f"'{at}.encrypted_content' was not sealed by this server for this caller; left out.", at)
        return text


def _item(identity: str, kind: str, **fields: Any) -> Item:
    return {"id": identity, "type": kind, "status": "completed", **fields}


def trigger(identity: str) -> Item:
    """Asks for a summary, in the words that the model reads."""
    return {
        "id": identity,
        "type": "compaction_trigger",
        "role": "user",
        "content": [text_part("input_text", _SUMMARISE)],
    }


def _summary(identity: str, sealed: str, text: str) -> Item:
    return {"id": identity, "type": "compaction", "encrypted_content": sealed, "summary": text}


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """A chat's messages. Consecutive thoughts, texts and calls of the assistant are one message."""
    messages: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        return messages[-1]

    for item in items:
        if item["type"] == "compaction":
            text = f"{_SUMMARY}\n{item['summary']}"
            item = _item(item["id"], "message", role="assistant", content=[text_part("output_text", text)])
        if item["type"] in CALLS:
            name, arguments = call_of(item)
            call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
            assistant().setdefault("tool_calls", []).append(call)
        elif item["type"] in RESULTS:
            output = chat_parts(item, "output") if is_of_parts(item.get("output")) else result_of(item)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif item["type"] == "reasoning":
            _add(assistant(), "reasoning_content", item.get("content") or item["summary"])
        elif item["role"] == "assistant":
            said = assistant()
            if "tool_calls" in said:
                messages.append(said := {"role": "assistant"})
            _add(said, "content", item["content"])
        elif item["role"] in ("system", "developer") and [one["role"] for one in messages] == ["system"]:
            _add(messages[0], "content", item["content"])  # templates know one system message, in front
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": chat_parts(item, "content")})
    return messages


def _add(message: dict[str, Any], name: str, parts: list[dict[str, Any]]) -> None:
    texts = [part.get("text") or part.get("refusal") or "" for part in parts]
    message[name] = "\n\n".join([message[name], *texts] if message.get(name) else texts)
