"""From the images of a request to pixels, and to their places in its prompt."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from api.errors.errors import TooManyBodies
from api.images.answer import Oversized
from api.images.decoding import Decoder, NotDecoded
from api.images.fetching import Fetcher
from api.images.hosts import UrlRefused
from api.images.limits import MOST_BYTES, MOST_PIXEL_BYTES, needs_more
from api.images.sources import INVALID, TOO_MANY, check_number, data_of, is_data, refused, too_large
from api.schemas.image_parts import ImageSource
from control.errors import RequestError
from control.messages import ImageInput, PromptImage
from control.requests import pieces_of

HELD_BYTES = 256 * 1024 * 1024
"""Pixels that an API process holds for requests that are not ended: it brings them back if Redis loses them."""
_CHANNELS = 3


class HeldPieces(list[bytes]):
    """The pieces of an image. Their memory counts for as long as this lives."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image without its place in a prompt; `tokens` stand for it, `sent` are its bytes as they came."""

    tokens: int
    height: int
    width: int
    digest: str
    sent: int = 0
    pieces: HeldPieces = field(default_factory=HeldPieces)


class Known(dict[str, LoadedImage]):
    """Images of one HTTP request that are loaded already, by URL: its prompt may be made several times to fit a
    context. `tenant` is the one that waits for them."""

    def __init__(self, tenant: str = "") -> None:
        super().__init__()
        self.tenant = tenant


class ImageLoader:
    """Loads the images of requests, for all models of an API process."""

    def __init__(self, held_bytes: int = HELD_BYTES, fetcher: Fetcher | None = None) -> None:
        """`fetcher`: None where nothing is fetched."""
        self._decoder, self._fetcher = Decoder(), fetcher
        self._most_held, self._held = held_bytes, 0

    async def stop(self) -> None:
        self._decoder.stop()

    async def load(
        self, sources: list[ImageSource], wanted: ImageInput, most_tokens: int, known: Known
    ) -> list[LoadedImage]:
        """The images in the order of their places, of `most_tokens` together at most; they are added to `known`.

        Raises RequestError naming the part, TooManyBodies.
        """
        check_number(sources)
        loaded: list[LoadedImage] = []
        room_sent, most_pixels = MOST_BYTES, most_tokens * wanted.unit * wanted.unit * _CHANNELS
        code = "context_length_exceeded" if most_pixels < MOST_PIXEL_BYTES else TOO_MANY
        room = min(MOST_PIXEL_BYTES, most_pixels)
        until = asyncio.get_running_loop().time() + (self._fetcher.patience_s if self._fetcher is not None else 0)
        for source in sources:
            image = known.get(source.url)
            if image is None:
                try:
                    image = known[source.url] = await self._loaded(source, wanted, room_sent, room, until, known.tenant)
                except NotDecoded as why:
                    raise refused(source.path, str(why), code if why.too_large else INVALID) from why
            elif image.sent > room_sent:
                raise too_large(source.path)
            elif (size := _pixel_bytes(image)) > room:
                raise refused(source.path, needs_more(size, image.width, image.height, room), code)
            loaded.append(image)
            room_sent -= image.sent
            room -= _pixel_bytes(image)
        return loaded

    async def _loaded(
        self, source: ImageSource, wanted: ImageInput, room_sent: int, room: int, until: float, tenant: str
    ) -> LoadedImage:
        async with self._data(source, room_sent, until, tenant) as data:
            sent, image = len(data), await self._decoder.decode(data, wanted, room, tenant)
        del data
        pieces = self._held_pieces(len(image.pixels))
        pieces += await asyncio.to_thread(pieces_of, image.pixels)
        tokens = image.height * image.width // (wanted.unit * wanted.unit)
        return LoadedImage(tokens, image.height, image.width, image.digest, sent, pieces)

    @asynccontextmanager
    async def _data(self, source: ImageSource, room: int, until: float, tenant: str) -> AsyncGenerator[bytes]:
        """The image as it was sent; what is fetched counts until the block is left."""
        if is_data(source):
            yield await asyncio.to_thread(data_of, source, room)
            return
        if self._fetcher is None:
            raise refused(
                source.path,
                "is no data URL, and this server fetches none: send data:image/png;base64,…, or start it with "
                "--image-hosts HOST",
            )
        try:
            data = await self._fetcher.fetch(source.url, room, until, tenant)
        except UrlRefused as why:
            raise refused(source.path, str(why)) from why
        except Oversized:
            raise too_large(source.path) from None
        try:
            yield data
        finally:
            self._fetcher.release(data, tenant)

    def _held_pieces(self, size: int) -> HeldPieces:
        """Raises TooManyBodies where `size` bytes are too many for this process."""
        if self._held + size > self._most_held:
            raise TooManyBodies(
                f"This API process holds images of {self._held} bytes for requests that have not ended, and has no "
                f"room for {size} more. Retry shortly."
            )
        pieces = HeldPieces()
        self._held += size
        weakref.finalize(pieces, self._release, size)
        return pieces

    def _release(self, size: int) -> None:
        self._held -= size


def _pixel_bytes(image: LoadedImage) -> int:
    return image.height * image.width * _CHANNELS


def with_marks(prompt: str | list[int], wanted: ImageInput) -> str | list[int]:
    """The prompt of a request with images as it is tokenised: some models have text around each image that their chat
    template does not write."""
    return prompt.replace(wanted.placeholder, wanted.text) if wanted.text and isinstance(prompt, str) else prompt


def placed(prompt: list[int], loaded: list[LoadedImage], wanted: ImageInput) -> tuple[list[int], list[PromptImage]]:
    """The prompt with as many placeholders for each image as it has tokens, and the images' places. Raises RequestError
    where the prompt has another number of placeholders than there are images: its text spells some out."""
    found = prompt.count(wanted.token)
    if found != len(loaded):
        raise RequestError(
            f"The prompt has {found} places for images, but the request has {len(loaded)} images. Remove "
            f"'{wanted.placeholder}' from its texts.",
            param="messages",
            code=INVALID,
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
