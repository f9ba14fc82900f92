"""From the images of a request to pixels, and to their places in its prompt."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass, field

from api.errors.errors import TooManyBodies
from api.images.decoding import Decoder, NotDecoded
from api.images.limits import MOST_BYTES, MOST_PIXEL_BYTES
from api.images.sources import check_number, data_of, is_data, refused
from api.schemas.image_parts import ImageSource
from control.errors import RequestError
from control.messages import ImageInput, PromptImage
from control.requests import pieces_of

HELD_BYTES = 256 * 1024 * 1024
"""Pixels that an API process holds for requests that are not ended: it brings them back if Redis loses them."""
_CHANNELS = 3


class HeldPieces(list[list[str]]):
    """The pieces of each image of a request. Their memory counts for as long as this lives."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image without its place in a prompt; `tokens` stand for it."""

    tokens: int
    height: int
    width: int
    digest: str


@dataclass(frozen=True, slots=True)
class LoadedImages:
    """The images of a request, in the order of their places."""

    images: list[LoadedImage] = field(default_factory=list[LoadedImage])
    pieces: HeldPieces = field(default_factory=HeldPieces)


class ImageLoader:
    """Loads the images of requests, for all models of an API process."""

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self._decoder = Decoder()
        self._most_held, self._held = held_bytes, 0

    async def stop(self) -> None:
        await self._decoder.stop()

    async def load(self, sources: list[ImageSource], wanted: ImageInput, most_tokens: int) -> LoadedImages:
        """The images, of `most_tokens` together at most. Raises RequestError naming the part, TooManyBodies."""
        check_number(sources)
        loaded = LoadedImages()
        if not sources:
            return loaded
        unit_bytes = wanted.unit * wanted.unit * _CHANNELS
        received, room = 0, min(MOST_PIXEL_BYTES, most_tokens * unit_bytes)
        for source in sources:
            data = await self._data(source, MOST_BYTES - received)
            received += len(data)
            try:
                image = await self._decoder.decode(data, wanted, room)
            except NotDecoded as why:
                raise refused(source.path, str(why)) from why
            del data
            room -= len(image.pixels)
            self._hold(loaded.pieces, len(image.pixels))
            loaded.pieces.append(await asyncio.to_thread(pieces_of, image.pixels))
            tokens = image.height * image.width // (wanted.unit * wanted.unit)
            loaded.images.append(LoadedImage(tokens, image.height, image.width, image.digest))
        return loaded

    async def _data(self, source: ImageSource, room: int) -> bytes:
        if is_data(source):
            return await asyncio.to_thread(data_of, source, room)
        raise refused(source.path, "is no data URL, and this server fetches none; send data:image/png;base64,…")

    def _hold(self, pieces: HeldPieces, size: int) -> None:
        if self._held + size > self._most_held:
            raise TooManyBodies(
                f"This API process holds images of {self._held} bytes for requests that have not ended, and has no "
                f"room for {size} more. Retry shortly."
            )
        self._held += size
        weakref.finalize(pieces, self._release, size)

    def _release(self, size: int) -> None:
        self._held -= size


def placed(prompt: list[int], loaded: list[LoadedImage], wanted: ImageInput) -> tuple[list[int], list[PromptImage]]:
    """The prompt with as many placeholders for each image as it has tokens, and the images' places. Raises RequestError
    where the prompt has another number of placeholders than there are images: its text spells some out."""
    found = prompt.count(wanted.token)
    if found != len(loaded):
        raise RequestError(
            f"The prompt has {found} places for images, but the request has {len(loaded)} images. Remove "
            f"'{wanted.placeholder}' from its texts.",
            param="messages",
            code="invalid_image",
        )
    whole: list[int] = []
    images: list[PromptImage] = []
    rest = iter(loaded)
    for token in prompt:
        if token != wanted.token:
            whole.append(token)
            continue
        one = next(rest)
        images.append(PromptImage(len(whole), one.tokens, one.height, one.width, one.digest))
        whole += [token] * one.tokens
    return whole, images
