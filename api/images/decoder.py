"""The process that decodes images: `python -m api.images.decoder MEMORY_BYTES SECONDS`.

Each message is a Job, and is answered with the image or a refusal (`control.confinement`). The address space is
bounded, so a bomb is a MemoryError here. What Pillow raises is a refusal, too. An image that takes more than SECONDS of
processor time kills the process by SIGPROF.
"""

from __future__ import annotations

import hashlib
import io
import math
import signal
import sys
import warnings

import msgspec
from PIL import Image, ImageOps, PngImagePlugin

from api.images.containers import MOST_METADATA, ImageRefused, check_exif, essential
from api.images.jobs import Answer, Decoded, Job, Refusal
from api.images.limits import FORMATS, MOST_PIXELS, needs_more
from control.confinement import answer_messages
from control.messages import ImageInput

_CHANNELS = 3
_STRETCHED = 200
"""The most that one side may be of the other, as in transformers."""


class ImageTooLarge(ImageRefused):
    """An image that is too large beside the others of its request."""


def main(memory_bytes: int, seconds: float) -> None:
    """Answer until the parent closes the pipe or ends."""
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # the limit is checked here, on every frame size
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK
    Image.init()
    decode = msgspec.msgpack.Decoder(Job).decode
    encode = msgspec.msgpack.Encoder().encode

    def answer(message: bytes) -> bytes:
        job = decode(message)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return encode(answer)

    answer_messages(answer, "furrow-images", memory_bytes=memory_bytes)


def _answer(job: Job) -> Answer:
    try:
        return decoded(job)
    except ImageRefused as why:
        return Refusal(str(why), isinstance(why, ImageTooLarge))
    except MemoryError:
        return Refusal("needs more memory than the decoder has; send a smaller one")
    except Exception as error:  # a decoder of Pillow met something damaged
        return Refusal(f"is damaged: {str(error)[:200] or type(error).__name__}")


def decoded(job: Job) -> Decoded:
    """The pictures are transformers': turned by their EXIF orientation, transparency on white; but grey values of 16
    bits are scaled. Raises ImageRefused, and what Pillow raises."""
    image_input = job.image_input
    room = job.room
    try:
        image: Image.Image = Image.open(io.BytesIO(essential(job.data)), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ImageRefused(f"is none that can be read; send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageRefused(f"has {width} × {height} pixels; at most {MOST_PIXELS // 1_000_000} million are decoded")
    _target(height, width, image_input, room)  # refuses before anything is decoded
    check_exif(len(image.info.get("exif", b"")))
    if len(image.info.get("xmp", b"")) > MOST_METADATA:
        del image.info["xmp"]
    image.load()
    image = _rgb(ImageOps.exif_transpose(image))
    height, width = _target(image.height, image.width, image_input, room)
    if (image.height, image.width) != (height, width):
        image = image.resize((width, height), image_input.resample)
    pixels = image.tobytes()
    digest = hashlib.sha256(f"{height} {width} ".encode() + pixels).hexdigest()
    return Decoded(height, width, digest, pixels)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would make all but the darkest values white
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _target(height: int, width: int, image_input: ImageInput, room: int) -> tuple[int, int]:
    """Height and width as the model takes them: a square of `side`, or multiples of `unit`. Raises ImageRefused and
    ImageTooLarge."""
    rows, columns = (image_input.side, image_input.side) if image_input.side else _multiples(height, width, image_input)
    if (size := rows * columns * _CHANNELS) > room:
        raise ImageTooLarge(needs_more(size, columns, rows, room))
    return rows, columns


def _multiples(height: int, width: int, image_input: ImageInput) -> tuple[int, int]:
    """Height and width as multiples of `unit`, within limits of pixels: transformers' smart_resize of Qwen2-VL. Raises
    ImageRefused."""
    if max(height, width) > _STRETCHED * min(height, width):
        raise ImageRefused(f"has {width} × {height} pixels; one side may be at most {_STRETCHED} times the other")
    unit = image_input.unit
    least = image_input.least_pixels
    most = image_input.most_pixels
    rows = round(height / unit) * unit
    columns = round(width / unit) * unit
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
