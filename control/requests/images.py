"""The pixels of a request's images, beside the request: written in pieces before it is queued, gone with its end.

A hash has a field `image:piece` for each piece. Its life is that of the request; before the request is queued it is
STAGED_MS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from control.errors import ImagesFull, RequestError
from control.keys import ModelKeys
from control.redis.connection import Call, read_bytes

PIECE_BYTES = 768 * 1024
"""Pixels of one piece: a round trip of a few milliseconds, far below the time-outs of connections."""

Pieces = Sequence[bytes]
"""The pieces of one image."""


def piece_count(size: int) -> int:
    """Into how many pieces `size` bytes are cut."""
    return -(-size // PIECE_BYTES)


def pieces_of(pixels: bytes) -> list[bytes]:
    """The pixels of an image in pieces."""
    return [pixels[at : at + PIECE_BYTES] for at in range(0, len(pixels), PIECE_BYTES)]


class ImageBounds(msgspec.Struct, frozen=True):
    """Bytes that the images of requests which have not ended may take in Redis."""

    model: int
    """All of a model; 0: any number."""
    tenant: int
    """Those of one tenant."""


ANY_BYTES = ImageBounds(0, 0)
"""For a request that Redis had and lost."""


def stage_images(model: str, rid: str, images: Sequence[Pieces], tenant: str, bounds: ImageBounds) -> list[Call[int]]:
    """Calls that write the images of a request that is not queued yet, one for each piece, in their order.

    Each returns the number of pieces that are there. The first raises ImagesFull where others take what there is, and
    RequestError where the images alone are too large.
    """
    keys = ModelKeys(model)
    total = sum(len(piece) for pieces in images for piece in pieces)

    def parse(reply: list[Any]) -> int:
        if not reply[1]:
            return int(reply[0])
        most = bounds.model if reply[1] == "model" else bounds.tenant
        if total > (alone := min(bounds.model, bounds.tenant)):
            raise RequestError(
                f"The images take {total} bytes as the model takes them, and at most {alone} are held for a tenant. "
                "Send fewer or smaller images.",
                code="too_many_images",
            )
        raise ImagesFull(model, reply[1], int(reply[2]), most)

    head = (keys.base, rid, tenant, total, bounds.model, bounds.tenant)
    return [
        Call("stage_image", (keys.images(rid), keys.image_bytes), (*head, f"{image}:{place}", piece), parse)
        for image, pieces in enumerate(images)
        for place, piece in enumerate(pieces)
    ]


def read_image(model: str, rid: str, image: int, size: int) -> list[Call[bytes | None]]:
    """Calls that read an image of `size` bytes, one for each piece; a piece that is gone is None."""
    key = ModelKeys(model).images(rid)
    return [read_bytes("HGET", key, f"{image}:{piece}", parse=_piece) for piece in range(piece_count(size))]


def _piece(reply: bytes | None) -> bytes | None:
    return reply
