"""Images as clients name them: URLs with the data in them, or on hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
import re

from api.images.limits import MOST_BYTES, MOST_IMAGES
from api.schemas.image_parts import ImageSource
from control.errors import RequestError

_DATA = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(;[\w=.+-]+)*?);base64,", re.ASCII | re.IGNORECASE)


def refused(path: str, why: str) -> RequestError:
    """The error for the image in the field `path`; `why` follows its name in a sentence."""
    return RequestError(f"The image in '{path}' {why}.", param=path, code="invalid_image")


def check_number(sources: list[ImageSource]) -> None:
    """Raise RequestError for more images than are served."""
    if len(sources) > MOST_IMAGES:
        raise RequestError(
            f"The request has {len(sources)} images; at most {MOST_IMAGES} are served. Send fewer.",
            param=sources[MOST_IMAGES].path,
            code="too_many_images",
        )


def is_data(source: ImageSource) -> bool:
    return source.url[:5].lower() == "data:"


def data_of(source: ImageSource, room: int) -> bytes:
    """The bytes of a `data:` URL, at most `room`. Raises RequestError."""
    head = _DATA.match(source.url)
    if head is None:
        raise refused(source.path, "is no data URL with base64; write data:image/png;base64,…")
    length = len(source.url) - head.end()
    if length * 3 // 4 - 2 > room:
        raise too_large(source.path)
    try:
        data = base64.b64decode(memoryview(source.url.encode("ascii"))[head.end() :], validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise refused(source.path, f"has no valid base64 ({error})") from error
    if len(data) > room:
        raise too_large(source.path)
    return data


def too_large(path: str) -> RequestError:
    return refused(path, f"is too large: the images of a request may have {MOST_BYTES // (1024 * 1024)} MiB together")
