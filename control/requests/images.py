"""The pixels of a request's images, beside the request: written in pieces before it is queued, gone with its end.

A hash has a field `image:piece` for each piece, as base64: values are text in every client. Its life is that of the
request; before the request is queued it is STAGED_MS.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from control.keys import ModelKeys
from control.redis.connection import Call, read

PIECE_BYTES = 768 * 1024
"""Pixels of one piece: a round trip of a few milliseconds, far below the time-outs of connections."""

Pieces = Sequence[str]
"""The pieces of one image."""


def piece_count(size: int) -> int:
    """Into how many pieces `size` bytes are cut."""
    return -(-size // PIECE_BYTES)


def pieces_of(pixels: bytes) -> list[str]:
    """The pixels of an image in pieces."""
    view = memoryview(pixels)
    return [base64.b64encode(view[at : at + PIECE_BYTES]).decode() for at in range(0, len(view), PIECE_BYTES)]


def stage_images(model: str, rid: str, images: Sequence[Pieces]) -> list[Call[int]]:
    """Calls that write the images of a request that is not queued yet, one for each piece."""
    key = ModelKeys(model).images(rid)
    return [
        Call("stage_image", (key,), (f"{image}:{piece}", text), int)
        for image, pieces in enumerate(images)
        for piece, text in enumerate(pieces)
    ]


def read_image(model: str, rid: str, image: int, size: int) -> list[Call[bytes | None]]:
    """Calls that read an image of `size` bytes, one for each piece; a piece that is gone is None."""
    key = ModelKeys(model).images(rid)

    def parse(reply: str | None) -> bytes | None:
        return None if reply is None else base64.b64decode(reply)

    return [read("HGET", key, f"{image}:{piece}", parse=parse) for piece in range(piece_count(size))]
