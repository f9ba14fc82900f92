"""From the images of a request to pixels, and to their places in its prompt.

Clients name images by URLs with the data in them, or on hosts that the operator allows.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from api.http.errors import TooManyBodies
from api.images.decoding import Decoder, NotDecoded
from api.images.fetching import Fetcher, Oversized
from api.images.hosts import UrlRefused
from api.images.limits import MOST_BYTES, MOST_IMAGES, MOST_PIXEL_BYTES, needs_more
from api.schemas.image_parts import ImageSource
from control.errors import RequestError
from control.messages import ImageInput, PromptImage
from control.requests import pieces_of

_DATA = re.compile(r"data:(?P<type>[\w.+/-]*)(?P<parameters>(;[\w=.+-]+)*?);base64,", re.ASCII | re.IGNORECASE)


# Codes of errors: an image that is not taken alone, and images that are too many or too large together.
INVALID = "invalid_image"
TOO_MANY = "too_many_images"
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


@dataclass(frozen=True, slots=True)
class RequestImages:
    """The images of one HTTP request: its prompt may be made several times to fit a context."""

    tenant: str = ""
    """The tenant that waits for them."""
    loaded: dict[str, LoadedImage] = field(default_factory=dict[str, LoadedImage])
    """By URL."""


class ImageLoader:
    """Loads the images of requests, for all models of an API process."""

    def __init__(self, held_bytes: int = HELD_BYTES, fetcher: Fetcher | None = None) -> None:
        """`fetcher`: None where nothing is fetched."""
        self._decoder = Decoder()
        self._fetcher = fetcher
        self._most_image_bytes = held_bytes
        self._image_bytes = 0

    async def stop(self) -> None:
        self._decoder.stop()

    async def load(
        self, sources: list[ImageSource], image_input: ImageInput, most_tokens: int, images: RequestImages
    ) -> list[LoadedImage]:
        """The images in the order of their places, of `most_tokens` together at most; they are added to `images`.

        Raises RequestError naming the part, TooManyBodies.
        """
        check_number(sources)
        loaded: list[LoadedImage] = []
        room_sent = MOST_BYTES
        most_pixels = most_tokens * image_input.unit * image_input.unit * _CHANNELS
        code = "context_length_exceeded" if most_pixels < MOST_PIXEL_BYTES else TOO_MANY
        room = min(MOST_PIXEL_BYTES, most_pixels)
        until = asyncio.get_running_loop().time() + (self._fetcher.patience_s if self._fetcher is not None else 0)
        for source in sources:
            image = images.loaded.get(source.url)
            if image is None:
                try:
                    image = await self._loaded(source, image_input, room_sent, room, until, images.tenant)
                    images.loaded[source.url] = image
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
        self, source: ImageSource, image_input: ImageInput, room_sent: int, room: int, until: float, tenant: str
    ) -> LoadedImage:
        async with self._data(source, room_sent, until, tenant) as data:
            sent = len(data)
            image = await self._decoder.decode(data, image_input, room, tenant)
        del data
        pieces = self._held_pieces(len(image.pixels))
        pieces += await asyncio.to_thread(pieces_of, image.pixels)
        tokens = image.height * image.width // (image_input.unit * image_input.unit)
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
        if self._image_bytes + size > self._most_image_bytes:
            raise TooManyBodies(
                f"This API process holds images of {self._image_bytes} bytes for requests that have not ended, and has "
                f"no room for {size} more. Retry shortly."
            )
        pieces = HeldPieces()
        self._image_bytes += size
        weakref.finalize(pieces, self._release, size)
        return pieces

    def _release(self, size: int) -> None:
        self._image_bytes -= size


def _pixel_bytes(image: LoadedImage) -> int:
    return image.height * image.width * _CHANNELS


def with_marks(prompt: str | list[int], image_input: ImageInput) -> str | list[int]:
    """The prompt of a request with images as it is tokenised: some models have text around each image that their chat
    template does not write."""
    return (
        prompt.replace(image_input.placeholder, image_input.text)
        if image_input.text and isinstance(prompt, str)
        else prompt
    )


def placed(
    prompt: list[int], loaded: list[LoadedImage], image_input: ImageInput
) -> tuple[list[int], list[PromptImage]]:
    """The prompt with as many placeholders for each image as it has tokens, and the images' places. Raises RequestError
    where the prompt has another number of placeholders than there are images: its text spells some out."""
    places = prompt.count(image_input.token)
    if places != len(loaded):
        raise RequestError(
            f"The prompt has {places} places for images, but the request has {len(loaded)} images. Remove "
            f"'{image_input.placeholder}' from its texts.",
            param="messages",
            code=INVALID,
        )
    whole: list[int] = []
    images: list[PromptImage] = []
    rest = iter(loaded)
    for token in prompt:
        if token != image_input.token:
            whole.append(token)
            continue
        image = next(rest)
        images.append(PromptImage(len(whole), image.tokens, image.height, image.width, image.digest))
        whole += [token] * image.tokens
    return whole, images
