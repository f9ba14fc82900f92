"""The items of /v1/responses: read strictly, kept in one form, and turned into a chat's messages.

The kept form is that of the answer's own items, so a stored conversation is input items and output items in a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec

from api.schemas.decoding import Warnings, convert_part, missing
from api.schemas.image_parts import Parts, chat_content, image_part
from api.schemas.image_parts import text_part as chat_text
from api.schemas.response_tools import qualified
from control.errors import RequestError

Item = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_WITH_IMAGES = ("user",)
"""The roles of messages that may have images."""
_DETAILS = ("auto", "low", "high", "original")
"""Without an effect: a model has its own limits of pixels."""
LEFT_OUT = "[An image was here. The summary tells of it.]"
"""In place of an image in what is kept beside a summary."""


class Part(msgspec.Struct, kw_only=True):
    """One part of a message or of a tool's output. Texts and images are served; the other types are refused by name."""

    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "reasoning_text",
        "summary_text",
        "input_image",
        "input_file",
        "input_audio",
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None


Content = str | list[Part]


def text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, "annotations": []} if kind == "output_text" else {"type": kind, "text": text}


def texts_of(content: Content, at: str) -> list[str]:
    """The texts of what may have no images. Raises RequestError for another part."""
    if isinstance(content, str):
        return [content]
    return [_text_of(part, f"{at}[{index}]", "text") for index, part in enumerate(content)]


def kept_parts(content: Content, at: str, role: str) -> Parts:
    """The content of a message of `role` in the kept form. Raises RequestError for a part that is not served."""
    kind = "output_text" if role == "assistant" else "input_text"
    if role in _WITH_IMAGES and not isinstance(content, str):
        return _parts_with_images(content, at)
    return [text_part(kind, text) for text in texts_of(content, at)]


def kept_output(output: Content, at: str) -> str | Parts:
    """The output of a function in the kept form: a text where it has no images. Raises as `kept_parts`."""
    if isinstance(output, str) or all(part.type != "input_image" for part in output):
        return "\n".join(texts_of(output, at))
    return _parts_with_images(output, at)


def is_of_parts(output: Any) -> bool:
    """True for the output of a function in parts; a shell's is a list of another kind."""
    return isinstance(output, list) and all("type" in part for part in cast(Parts, output))


def has_images(items: list[Item]) -> bool:
    contents = [item.get(name) for item in items for name in ("content", "output")]
    return any(part["type"] == "input_image" for parts in contents if is_of_parts(parts) for part in parts or [])


def chat_parts(item: Item, name: str) -> str | Parts:
    """The parts of an item, in its field `name`, as the content of a chat's message."""
    parts: Parts = item[name]
    return chat_content(
        [
            image_part(part["image_url"], f"{item['id']}.{name}[{index}].image_url")
            if part["type"] == "input_image"
            else chat_text(part["text"])
            for index, part in enumerate(parts)
        ]
    )


def without_images(item: Item) -> Item:
    """A message, with a note in place of each image."""
    if all(part["type"] != "input_image" for part in item["content"]):
        return item
    parts = [text_part("input_text", LEFT_OUT) if part["type"] == "input_image" else part for part in item["content"]]
    return item | {"content": parts}


def size_of(item: Item) -> int:
    """About the characters of an item in a prompt: an image is as small as the context that it takes."""
    if not any(is_of_parts(item.get(name)) for name in ("content", "output")):
        return len(str(item))
    return len(str({name: _shortened(value) for name, value in item.items()}))


def _shortened(value: Any) -> Any:
    if not is_of_parts(value):
        return value
    return [part["type"] if part["type"] == "input_image" else part for part in cast(Parts, value)]


def _parts_with_images(content: list[Part], at: str) -> Parts:
    return [
        _image(part, f"{at}[{index}]")
        if part.type == "input_image"
        else text_part("input_text", _text_of(part, f"{at}[{index}]", "text and images"))
        for index, part in enumerate(content)
    ]


def _image(part: Part, at: str) -> dict[str, Any]:
    if part.file_id is not None:
        raise RequestError(
            f"'{at}.file_id' is not served: this server keeps no files. Send the image in 'image_url'.",
            param=f"{at}.file_id",
            code="unsupported_content",
        )
    if part.image_url is None:
        raise missing(f"{at}.image_url")
    if not isinstance(part.image_url, str):
        raise RequestError(f"'{at}.image_url' must be a URL.", param=f"{at}.image_url", code="invalid_type")
    if part.detail not in (None, *_DETAILS):
        raise RequestError(f"Invalid value for '{at}.detail'; use one of {', '.join(_DETAILS)}.", param=f"{at}.detail")
    return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}


def _text_of(part: Part, at: str, types: str) -> str:
    if part.type not in _TEXTS:
        raise RequestError(
            f"'{at}' has type '{part.type}'; {types} can be here.",
            param=f"{at}.type",
            code="unsupported_content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing(f"{at}.{'refusal' if part.type == 'refusal' else 'text'}")
    return text


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


class SentLocalShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(msgspec.Struct, kw_only=True):
    type: Literal["local_shell_call"]
    action: SentLocalShellAction
    call_id: str | None = None
    id: str | None = None


class LocalShellCallOutput(msgspec.Struct, kw_only=True):
    """`id` is that of the call where there is no `call_id`."""

    type: Literal["local_shell_call_output"]
    output: str
    id: str | None = None
    call_id: str | None = None


class SentShellAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, kw_only=True):
    type: Literal["shell_call"]
    call_id: str
    action: SentShellAction
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


class SentPatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCall(msgspec.Struct, kw_only=True):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: SentPatchOperation
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
    return "\n".join(_output_text(entry) for entry in cast("list[Item]", output))


def _output_text(output: Item) -> str:
    outcome = output.get("outcome") or {}
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
    return "\n".join(text.rstrip("\n") for text in (ended, output["stdout"], output["stderr"]) if text)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
            message = assistant()
            if "tool_calls" in message:
                messages.append(message := {"role": "assistant"})
            _add(message, "content", item["content"])
        elif item["role"] in ("system", "developer") and [message["role"] for message in messages] == ["system"]:
            _add(messages[0], "content", item["content"])  # templates know one system message, in front
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": chat_parts(item, "content")})
    return messages


def _add(message: dict[str, Any], name: str, parts: list[dict[str, Any]]) -> None:
    texts = [part.get("text") or part.get("refusal") or "" for part in parts]
    message[name] = "\n\n".join([message[name], *texts] if message.get(name) else texts)
