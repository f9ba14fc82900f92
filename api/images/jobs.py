"""The messages between an API process and the process that decodes its images, in MessagePack."""

from __future__ import annotations

import msgspec

from control.messages import ImageInput


class Job(msgspec.Struct, frozen=True):
    """An image as it was sent, to be decoded for a model into at most `room` bytes of pixels."""

    data: bytes
    image_input: ImageInput
    room: int


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """An image as the model takes it: rows of red, green and blue."""

    height: int
    width: int
    digest: str
    pixels: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The reason why an image is not taken; the text follows the image's name in a sentence. `too_large`: it is only
    too large beside the others of its request."""

    why: str
    too_large: bool = False


Answer = Decoded | Refusal
