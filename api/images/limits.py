"""Limits on the images of one request. Each is checked before the data is read or decoded."""

from __future__ import annotations

MOST_IMAGES = 10
MOST_BYTES = 20 * 1024 * 1024
"""All images of a request, as they are sent."""
MOST_PIXELS = 40_000_000
"""One image, by its header."""
MOST_PIXEL_BYTES = 64 * 1024 * 1024
"""All images of a request as the model takes them, three bytes a pixel: so much of Redis they take."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names of the formats that are decoded; of several frames the first."""


def needs_more(size: int, width: int, height: int, room: int) -> str:
    """The reason why an image of `size` bytes of pixels is refused where `room` are left; it follows the image's
    name."""
    return (
        f"needs {size} bytes as the model takes it ({width} × {height} pixels), but {room} are left for the images of "
        "this request; send fewer or smaller ones"
    )
