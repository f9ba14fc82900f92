"""Parts of the items of /v1/responses: texts and images of messages, and of the outputs of tools."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec

from api.schemas.decoding import missing
from api.schemas.image_parts import Parts, chat_content, image_part
from api.schemas.image_parts import text_part as chat_text
from api.schemas.tool_items import Item
from control.errors import RequestError

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
    parts = [text_part("input_text", LEFT_OUT) if one["type"] == "input_image" else one for one in item["content"]]
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
