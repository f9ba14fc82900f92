"""Images among the parts of messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from api.schemas.decoding import Names, missing
from control.errors import RequestError

Parts = list[dict[str, Any]]
"""Parts of a chat's message, as JSON."""

_AT = "at"
"""Member of an image's object that has the client's own name of the field; `client_names` takes it out."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request: its URL, and the name of its field."""

    url: str
    path: str


def image_source(url: Any, path: str) -> ImageSource:
    """The source that the field `path` names: a URL, or an object with one. Raises RequestError."""
    if isinstance(url, dict):
        url = cast(dict[str, Any], url).get("url")
    if url is None:
        raise missing(path)
    if not isinstance(url, str):
        raise RequestError(f"'{path}' must be a URL, or an object with 'url'.", param=path)
    return ImageSource(url, path)


def image_part(url: str, at: str) -> dict[str, Any]:
    """A chat's part for an image that the client sent in another form, in the field `at`."""
    return {"type": "image_url", "image_url": {"url": url, _AT: at}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat_content(parts: Parts) -> str | Parts:
    """The content of a chat's message: one text where there is no image, else the parts in their order. Texts in a row
    are one, in lines."""
    merged: Parts = []
    for kind, group in groupby(parts, lambda part: part["type"]):
        same = list(group)
        merged += [text_part("\n".join(part["text"] for part in same))] if kind == "text" else same
    if any(part["type"] != "text" for part in merged):
        return merged
    return merged[0]["text"] if merged else ""


def client_names(messages: list[dict[str, Any]]) -> Names:
    """The client's own names of the images in converted messages, by their names in the chat request."""
    names: Names = {}
    for index, message in enumerate(messages):
        for place, image in _images_of(message):
            names[f"messages[{index}].content[{place}].image_url"] = image.pop(_AT)
    return names


def _images_of(message: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    content = message.get("content")
    if isinstance(content, list):
        for place, part in enumerate(cast(Parts, content)):
            if part["type"] == "image_url":
                yield place, part["image_url"]
