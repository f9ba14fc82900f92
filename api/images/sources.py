"""Images as clients name them: URLs with the data in them, or on hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
import re

from api.images.limits import MOST_BYTES, MOST_IMAGES
from api.schemas.image_parts import ImageSource
from control.errors import RequestError

_DATA = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(;[\w=.+-]+)*?);base64,", re.ASCII | re.IGNORECASE)


INVALID, TOO_MANY = "invalid_image", "too_many_images"
"""Codes of errors: an image that is not taken alone, and images that are too many or too large together."""
_HEAD_CHARACTERS = 256
"""Of a data URL's head."""
_WHITE = b" \t\r\n\f"


def refused(path: str, why: str, code: str = INVALID) -> RequestError:
    """The error for the image in the field `path`; `why` follows its name in a sentence."""
    return RequestError(f"The image in '{path}' {why}.", param=path, code=code)


def check_number(sources: list[ImageSource]) -> None:
    """Raise RequestError for more images than are served."""
    if len(sources) > MOST_IMAGES:
        raise RequestError(
            f"The request has {len(sources)} images; at most {MOST_IMAGES} are served. Send fewer.",
            param=sources[MOST_IMAGES].path,
            code=TOO_MANY,
        )


def is_data(source: ImageSource) -> bool:
    return source.url[:5].lower() == "data:"


def data_of(source: ImageSource, room: int) -> bytes:
    """The bytes of a `data:` URL, at most `room`. White space in the base64 is passed over, and padding may be missing.

    Raises RequestError.
    """
    head = _DATA.match(source.url[:_HEAD_CHARACTERS])
    if head is None:
        raise refused(source.path, "is no data URL with base64; write data:image/png;base64,…")
    try:
        text = source.url[head.end() :].encode("ascii").translate(None, _WHITE)
    except UnicodeEncodeError:
        raise refused(source.path, "has characters that are not base64's") from None
    if len(text) * 3 // 4 - 2 > room:
        raise too_large(source.path)
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        if b"-" in text or b"_" in text:
            raise refused(source.path, "has base64's URL-safe alphabet; send the standard one, with + and /") from error
        raise refused(source.path, f"has no valid base64 ({error})") from error


def too_large(path: str) -> RequestError:
    most = MOST_BYTES // (1024 * 1024)
    return refused(path, f"is too large: the images of a request may have {most} MiB together", TOO_MANY)
