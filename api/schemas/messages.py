"""The messages of a conversation, as clients send them and as chat templates expect them."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

import msgspec

from api.schemas.image_parts import ImageSource, image_source
from api.schemas.refusals import missing, refusal
from control.errors import RequestError

WITH_IMAGES = ("user", "tool")
"""The roles of messages that may have images."""


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message: text, and images where the model takes them. Other types are refused by name."""

    type: Literal["text", "image_url", "input_audio", "file", "video_url", "refusal"]
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""
    """JSON text."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction | None = None
    # Clients that keep stream chunks send the place back too.
    index: int | None = None
    custom: Any = None


class Message(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Present in answers that clients send back as history, where they are empty.
    refusal: str | None = None
    audio: Any = None
    function_call: CalledFunction | None = None
    """The older form of one call, whose result comes in a message with role 'function'."""


def template_messages(messages: list[Message], images: list[ImageSource] | None = None) -> list[dict[str, Any]]:
    """Plain dicts with text content and arguments as mappings. Messages with images have a list of parts; their sources
    are added to `images`, None for a model that takes none. Raises RequestError for what is not served."""
    names: dict[str, str] = {}
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.function_call is not None or message.role == "function":
            message = _modern(message, at, names, f"call_{index}")
        for call in message.tool_calls or []:
            if call.function is not None:
                names[call.id] = call.function.name
        plain.append(_plain(message, at, names, images))
    return plain


def _modern(message: Message, path: str, names: dict[str, str], new: str) -> Message:
    """A call or a result of the older form, which has no ids, in the form of tools: a result is the last call's."""
    if message.function_call is not None:
        if message.tool_calls:
            raise RequestError(
                f"'{path}' has both 'tool_calls' and 'function_call'; send one of them.", param=f"{path}.function_call"
            )
        call = ToolCall(id=new, function=message.function_call)
        return msgspec.structs.replace(message, tool_calls=[call], function_call=None)
    if message.name is None:
        raise missing(f"{path}.name")
    called = next((known for known in reversed(names) if names[known] == message.name), new)
    return msgspec.structs.replace(message, role="tool", tool_call_id=called, content=message.content or "")


def _plain(message: Message, path: str, names: dict[str, str], images: list[ImageSource] | None) -> dict[str, Any]:
    if message.audio not in (None, [], {}):
        raise refusal(f"{path}.audio")
    content = text_of(message, path) if images is None or not _has_images(message) else _parts(message, path, images)
    # Templates know four roles; "developer" is OpenAI's newer name for "system".
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.role == "tool":
        plain |= _result(message, path, names)
    elif message.tool_call_id is not None:
        raise RequestError(f"'{path}.tool_call_id' belongs to role 'tool'.", param=f"{path}.tool_call_id")
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(f"'{path}.tool_calls' belongs to role 'assistant'.", param=f"{path}.tool_calls")
        plain["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _result(message: Message, path: str, names: dict[str, str]) -> dict[str, Any]:
    """The call that a result belongs to; some templates ask for the function's name."""
    if message.tool_call_id is None:
        raise RequestError(f"Missing required parameter: '{path}.tool_call_id'.", param=f"{path}.tool_call_id")
    name = message.name or names.get(message.tool_call_id)
    return {"tool_call_id": message.tool_call_id} | ({"name": name} if name else {})


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    """A call in OpenAI's form, but with a mapping for its arguments: templates write that as JSON themselves."""
    if call.type != "function" or call.custom is not None:
        raise refusal(f"{path}.type")
    if call.function is None:
        raise RequestError(f"Missing required parameter: '{path}.function'.", param=f"{path}.function")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """A mapping, or the text itself where a model had written something else."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast(dict[str, Any], value) if isinstance(value, dict) else text


def _has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(part.type == "image_url" for part in message.content)


def _parts(message: Message, path: str, images: list[ImageSource]) -> list[dict[str, str]]:
    """Texts and images in their order, as templates expect them."""
    if message.role not in WITH_IMAGES:
        raise RequestError(
            f"'{path}' has images, which messages of role {' and '.join(repr(role) for role in WITH_IMAGES)} may have.",
            param=f"{path}.content",
            code="unsupported_content",
        )
    assert isinstance(message.content, list)
    parts: list[dict[str, str]] = []
    for index, part in enumerate(message.content):
        here = f"{path}.content[{index}]"
        if part.type == "image_url":
            images.append(image_source(part.image_url, f"{here}.image_url"))
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text_of_part(part, here, "text and image")})
    return parts


def text_of(message: Message, path: str) -> str:
    """The content as one text. Raises RequestError for a part that is not served."""
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.refusal is not None:
            return message.refusal
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content or message.reasoning):
            return ""
        raise RequestError(f"Missing required parameter: '{path}.content'.", param=f"{path}.content")
    parts = enumerate(message.content)
    return "\n".join(_text_of_part(part, f"{path}.content[{index}]", "text") for index, part in parts)


def _text_of_part(part: ContentPart, here: str, taken: str) -> str:
    """The text of a part; a model takes parts of kinds `taken`."""
    if part.type not in ("text", "refusal"):
        raise RequestError(
            f"'{here}.{part.type}' is not taken: this model takes {taken} parts only.",
            param=f"{here}.{part.type}",
            code="unsupported_content",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise RequestError(f"Missing required parameter: '{here}.{part.type}'.", param=f"{here}.{part.type}")
    return text
