"""Images of a model's requests take bounded Redis memory: over the bound a request is refused, and others stay."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import ImagesFull, RequestError
from control.requests import ANY_BYTES, ImageBounds
from control.requests.enqueue import PIECE_BYTES
from tests.contract.conftest import MODEL, Farm

BOUNDS = ImageBounds(model=24, tenant=12)
PIECE = bytes(range(0xFC, 0x100))
"""No text: these bytes occur in no UTF-8."""


def stage(farm: Farm, rid: str, tenant: str, pieces: int, bounds: ImageBounds = BOUNDS) -> None:
    for call in requests.stage_images(MODEL, rid, [[PIECE] * pieces], tenant, bounds):
        farm.run(call)


def held(farm: Farm) -> set[str]:
    return {str(rid) for rid in farm.client.hgetall(farm.keys.image_bytes)}


def test_pixels_are_held_as_bytes(farm: Farm) -> None:
    """A byte for each byte, whatever it is, and they come back as they went, in every piece."""
    pixels = bytes(range(256)) * (PIECE_BYTES // 256) + PIECE
    for call in requests.stage_images(MODEL, "a", [requests.pieces_of(pixels)], "t", ANY_BYTES):
        farm.run(call)
    key = farm.keys.images("a")
    assert sum(farm.client.hstrlen(key, field) for field in farm.client.hkeys(key)) == len(pixels)
    pieces = [farm.run(call) for call in requests.read_image(MODEL, "a", 0, len(pixels))]
    assert pieces == [pixels[:PIECE_BYTES], PIECE]
    farm.client.hdel(key, "0:1")
    assert farm.run(requests.read_image(MODEL, "a", 0, len(pixels))[1]) is None


def test_a_tenant_and_a_model_have_their_bounds(farm: Farm) -> None:
    """Nothing of a refused request is written; what others have stays."""
    stage(farm, "a", "t", 2)
    with pytest.raises(ImagesFull, match="take 8 of the 12 bytes that this tenant"):
        stage(farm, "b", "t", 2)
    assert not farm.client.exists(farm.keys.images("b"))
    stage(farm, "b", "t", 1)
    stage(farm, "c", "u", 2)
    with pytest.raises(ImagesFull, match="take 20 of the 24 bytes that model"):
        stage(farm, "d", "v", 2)
    stage(farm, "a", "t", 2)  # a repeat takes no more
    assert held(farm) == {"a", "b", "c"} and farm.client.hlen(farm.keys.images("a")) == 2


def test_images_that_are_gone_are_not_counted(farm: Farm) -> None:
    """However they went: with the end of their request, or because it was never queued."""
    stage(farm, "a", "t", 3)
    stage(farm, "b", "u", 3)
    with pytest.raises(ImagesFull):
        stage(farm, "c", "t", 1)
    farm.client.delete(farm.keys.images("a"))
    stage(farm, "c", "t", 3)
    assert held(farm) == {"b", "c"}


def test_images_that_alone_are_too_large(farm: Farm) -> None:
    """Waiting would not help: the error is the request's. One that Redis has lost is refused by no bound."""
    with pytest.raises(RequestError, match=r"take 16 bytes .* at most 12"):
        stage(farm, "a", "t", 4)
    stage(farm, "a", "t", 9, ANY_BYTES)
    assert farm.client.hlen(farm.keys.images("a")) == 9
