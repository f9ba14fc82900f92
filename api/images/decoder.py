"""The process that decodes images: `python -m api.images.decoder MEMORY_BYTES SECONDS`.

It reads jobs from standard input and answers each on standard output; both are a length (4 bytes, big-endian), JSON of
that length, and then the bytes that the JSON announces. It ends with its input. Its address space is bounded, so a bomb
is a MemoryError here. What Pillow raises is an answer, too. An image that takes more than SECONDS of processor time
kills the process by SIGPROF.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import resource
import signal
import struct
import sys
import warnings
from typing import IO, Any

from PIL import Image, ImageOps, PngImagePlugin

from api.images.containers import MOST_METADATA, Refused, check_exif, essential
from api.images.limits import FORMATS, MOST_PIXELS, needs_more

_CHANNELS = 3
_STRETCHED = 200
"""The most that one side may be of the other, as in transformers."""


class TooLarge(Refused):
    """An image that is too large beside the others of its request."""


def main(memory_bytes: int, seconds: float, jobs: IO[bytes], answers: IO[bytes]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # the limit is checked here, on every frame size
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK
    Image.init()
    while len(head := jobs.read(4)) == 4:
        job = json.loads(jobs.read(*struct.unpack(">I", head)))
        data = jobs.read(job["bytes"])
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            pixels, told = decoded(data, job)
        except Refused as why:
            pixels, told = b"", {"error": str(why), "too_large": isinstance(why, TooLarge)}
        except MemoryError:
            pixels, told = b"", {"error": "needs more memory than the decoder has; send a smaller one"}
        except Exception as error:  # a decoder of Pillow met something damaged
            pixels, told = b"", {"error": f"is damaged: {str(error)[:200] or type(error).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data
        head = json.dumps(told | {"bytes": len(pixels)}).encode()
        answers.write(struct.pack(">I", len(head)) + head)
        answers.write(pixels)
        answers.flush()


def decoded(data: bytes, job: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """The pixels of an image as the model takes them, rows of red, green and blue; and height, width and digest. The
    pictures are transformers': turned by their EXIF orientation, transparency on white; but grey values of 16 bits are
    scaled. Raises Refused, and what Pillow raises."""
    try:
        image: Image.Image = Image.open(io.BytesIO(essential(data)), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise Refused(f"is none that can be read; send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise Refused(f"has {width} × {height} pixels; at most {MOST_PIXELS // 1_000_000} million are decoded")
    _target(height, width, job)  # refuses before anything is decoded
    check_exif(len(image.info.get("exif", b"")))
    if len(image.info.get("xmp", b"")) > MOST_METADATA:
        del image.info["xmp"]
    image.load()
    image = _rgb(ImageOps.exif_transpose(image))
    height, width = _target(image.height, image.width, job)
    if (image.height, image.width) != (height, width):
        image = image.resize((width, height), job["resample"])
    pixels = image.tobytes()
    digest = hashlib.sha256(f"{height} {width} ".encode() + pixels).hexdigest()
    return pixels, {"height": height, "width": width, "digest": digest}


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would make all but the darkest values white
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _target(height: int, width: int, job: dict[str, Any]) -> tuple[int, int]:
    """Height and width as the model takes them: a square of `side`, or multiples of `unit`. Raises Refused and
    TooLarge."""
    rows, columns = (job["side"], job["side"]) if job["side"] else _multiples(height, width, job)
    if (size := rows * columns * _CHANNELS) > job["room"]:
        raise TooLarge(needs_more(size, columns, rows, job["room"]))
    return rows, columns


def _multiples(height: int, width: int, job: dict[str, Any]) -> tuple[int, int]:
    """Height and width as multiples of `unit`, within limits of pixels: transformers' smart_resize of Qwen2-VL. Raises
    Refused."""
    if max(height, width) > _STRETCHED * min(height, width):
        raise Refused(f"has {width} × {height} pixels; one side may be at most {_STRETCHED} times the other")
    unit, least, most = job["unit"], job["least_pixels"], job["most_pixels"]
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / unit) * unit for side in (height, width))
    return rows, columns


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
