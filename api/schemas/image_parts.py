"""Images among the parts of messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from api.schemas.refusals import missing
from control.errors import RequestError


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request: its URL, and the name of its field."""

    url: str
    path: str


def image_source(given: Any, path: str) -> ImageSource:
    """The source that the field `path` names: a URL, or an object with one. Raises RequestError."""
    if isinstance(given, dict):
        given = cast(dict[str, Any], given).get("url")
    if given is None:
        raise missing(path)
    if not isinstance(given, str):
        raise RequestError(f"'{path}' must be a URL, or an object with 'url'.", param=path)
    return ImageSource(given, path)
