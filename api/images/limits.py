"""Limits on the images of one request. Each is checked before what it limits is read or decoded."""

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
