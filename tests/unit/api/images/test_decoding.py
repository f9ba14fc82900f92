"""Hostile images end no process: each limit is checked before decoding."""

from __future__ import annotations

import asyncio
import base64
import io
import random
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from api.images.containers import ImageRefused
from api.images.decoder import decoded
from api.images.decoding import Decoder, NotDecoded
from api.images.jobs import Job
from api.images.limits import MOST_BYTES, MOST_IMAGES
from api.images.loading import ImageLoader, LoadedImage, RequestImages, data_of, placed, with_marks
from api.schemas.image_parts import ImageSource
from control.errors import RequestError
from control.messages import ImageInput
from tests import image_models, models
from worker.repository import multimodal

WANTED = ImageInput(
    kind="grid", token=9, placeholder="<i>", unit=8, least_pixels=64, most_pixels=8 * 8 * 24, resample=3
)
SQUARE = msgspec.structs.replace(WANTED, kind="square", side=image_models.SIDE, resample=2)
ROOM = 1 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@pytest.fixture
async def decoder() -> AsyncIterator[Decoder]:
    decoder = Decoder()
    yield decoder
    decoder.stop()


def stored(kind: str, seed: int = 1) -> bytes:
    data = io.BytesIO()
    image_models.noise(seed, 40, 30).save(data, kind)
    return data.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG whose header says these dimensions."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


async def test_pixels_are_those_of_transformers(decoder: Decoder) -> None:
    """Resized as its processors of Qwen and Gemma do it, with the digest that the tests of the engine use."""
    pictures = [(image_models.picture(*one), WANTED) for one in ((1,), (2, 17, 40))]
    pictures += [(image_models.square(*one), SQUARE) for one in ((1,), (2, 17, 40), (3, 700, 3))]
    for picture, wanted in pictures:
        data = io.BytesIO()
        picture.original.save(data, "PNG")
        found = await decoder.decode(data.getvalue(), wanted, ROOM)
        assert np.array_equal(np.frombuffer(found.pixels, np.uint8).reshape(picture.pixels.shape), picture.pixels)
        assert found.digest == picture.placed(0).digest


async def test_a_thousand_damaged_images_end_no_process(decoder: Decoder) -> None:
    """Bytes changed, cut and repeated at random in four formats: each is decoded or refused by the same process."""
    generator, whole = random.Random(0), [stored(kind) for kind in FORMATS]
    await decoder.decode(whole[0], WANTED, ROOM)
    first, refused = decoder.pid, 0
    for _ in range(1000):
        data = bytearray(generator.choice(whole))
        for _ in range(generator.randint(1, 20)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        try:
            await decoder.decode(bytes(data), WANTED, ROOM)
        except NotDecoded as error:
            refused += 1
            assert "ended the process" not in str(error)
    assert decoder.pid == first and refused > 300


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(60_000, 60_000), "million are decoded"),
        (png(3_000, 2), "200 times the other"),
        (png(64, 64), "is damaged"),
        (b"GIF89a", "none that can be read"),
        (b"%PDF-1.7", "none that can be read"),
        (b"", "none that can be read"),
    ],
)
async def test_what_is_refused(decoder: Decoder, data: bytes, why: str) -> None:
    with pytest.raises(NotDecoded, match=why):
        await decoder.decode(data, WANTED, ROOM)


async def test_a_bomb_meets_the_bound_of_memory() -> None:
    """39 million pixels in 120 KB, where less memory is given than they need: refused, and the process goes on."""
    decoder = Decoder(memory_bytes=300 << 20)
    try:
        bomb = png(6_500, 6_000, bytes((6_500 * 3 + 1) * 6_000))
        assert len(bomb) < 200_000
        await decoder.decode(stored("PNG"), WANTED, ROOM)
        first = decoder.pid
        with pytest.raises(NotDecoded, match=r"memory|damaged"):
            await decoder.decode(bomb, WANTED, ROOM)
        await decoder.decode(stored("PNG"), WANTED, ROOM)
        assert decoder.pid == first
    finally:
        decoder.stop()


async def test_a_late_image_is_given_up() -> None:
    """Another process decodes the next one."""
    decoder = Decoder(deadline_s=0.0)
    late = png(6_500, 6_000, bytes((6_500 * 3 + 1) * 6_000))
    with pytest.raises(NotDecoded, match="more than 0 s"):
        await decoder.decode(late, WANTED, ROOM)
    assert decoder.pid is None


async def test_an_image_that_takes_too_much_processor_time_is_given_up() -> None:
    """It ends the process that decodes it, and another process decodes the next one."""
    decoder = Decoder(processor_s=0.1)
    try:
        with pytest.raises(NotDecoded, match=r"more than 0\.1 s of processor time"):
            await decoder.decode(png(6_500, 6_000, bytes((6_500 * 3 + 1) * 6_000)), WANTED, ROOM)
        assert (await decoder.decode(stored("PNG"), WANTED, ROOM)).height
    finally:
        decoder.stop()


async def test_turns_at_the_decoder_go_by_time(decoder: Decoder) -> None:
    """A tenant with dear images, all of which are refused in the end, delays ten cheap ones of another tenant by two at
    most. In turns one by one each of the ten would wait for one."""
    done = list[str]()
    dear = png(3_000, 3_000, bytes((3_000 * 3 + 1) * 3_000))[:-20]
    await decoder.decode(stored("PNG"), WANTED, ROOM)

    async def decode(tenant: str, data: bytes) -> None:
        with suppress(NotDecoded):
            await decoder.decode(data, WANTED, ROOM, tenant)
        done.append(tenant)

    many = [asyncio.create_task(decode("dear", dear)) for _ in range(6)]
    await asyncio.sleep(0)
    await asyncio.gather(*(decode("cheap", stored("PNG")) for _ in range(10)))
    assert done.count("dear") <= 2
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)


async def test_tenants_take_turns_at_the_decoder(decoder: Decoder) -> None:
    """Of one tenant's images at most the one under way and one more come before another's."""
    done, bomb = list[str](), png(800, 800, bytes((800 * 3 + 1) * 800))

    async def decode(tenant: str, data: bytes) -> None:
        await decoder.decode(data, WANTED, ROOM, tenant)
        done.append(tenant)

    many = [asyncio.create_task(decode("many", bomb)) for _ in range(8)]
    await asyncio.sleep(0)
    given_up = asyncio.create_task(decode("gone", bomb))
    await asyncio.sleep(0)
    given_up.cancel()
    await decode("few", stored("PNG"))
    assert done.index("few") <= 2
    await asyncio.gather(*many)
    assert done.count("many") == 8 and "gone" not in done


def source(data: bytes, path: str = "here") -> ImageSource:
    return ImageSource("data:image/png;base64," + base64.b64encode(data).decode(), path)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ([source(b"x", str(index)) for index in range(MOST_IMAGES + 1)], "has 11 images; at most 10"),
        ([ImageSource("data:image/png;base64," + "A" * (MOST_BYTES * 4 // 3 + 64), "here")], "20 MiB together"),
        ([ImageSource("data:image/png;base64,!!!!", "here")], "no valid base64"),
        ([ImageSource("data:image/png;base64,A-_A", "here")], "URL-safe alphabet"),
        ([ImageSource("data:image/png;base64,é", "here")], "not base64's"),
        ([ImageSource("data:" + ";a=b" * 100_000, "here")], "no data URL with base64"),
        ([ImageSource("data:image/png,abc", "here")], "no data URL with base64"),
        ([ImageSource("http://127.0.0.1/secret.png", "here")], "fetches none"),
        ([ImageSource("file:///etc/passwd", "here")], "fetches none"),
        ([source(stored("PNG"))], "are left for the images"),
    ],
)
async def test_limits_name_the_part(sources: list[ImageSource], why: str) -> None:
    """Each with a 400; the last one by the tokens that the context has left."""
    loader = ImageLoader()
    try:
        with pytest.raises(RequestError, match=why) as refused:
            await loader.load(sources, WANTED, 3, RequestImages())
        assert refused.value.param == ("10" if len(sources) > 1 else "here")
    finally:
        await loader.stop()


def test_placeholders_become_as_many_as_an_image_has_tokens() -> None:
    loaded = [LoadedImage(2, 8, 16, "a"), LoadedImage(3, 8, 24, "b")]
    prompt, images = placed([1, 9, 2, 9], loaded, WANTED)
    assert prompt == [1, 9, 9, 2, 9, 9, 9]
    assert [(one.start, one.count) for one in images] == [(1, 2), (4, 3)]
    with pytest.raises(RequestError, match="3 places for images, but the request has 2"):
        placed([9, 9, 9], loaded, WANTED)


def test_the_prompt_of_gemma_is_its_processors() -> None:
    """Line ends and marks around an image are tokenised with the text beside them."""
    tokens = dict(zip(("boi_token", "image_token", "eoi_token"), image_models.GEMMA_MARKS, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=models.tokenizer().backend_tokenizer, extra_special_tokens=tokens
    )
    count = (image_models.SIDE // image_models.UNIT) ** 2
    prepare = Gemma3Processor(
        Gemma3ImageProcessorPil(**image_models.GEMMA_PROCESSOR), tokenizer, image_seq_length=count
    )
    text = "look\n<start_of_image>\nand <start_of_image>"
    pictures = [image_models.square(seed) for seed in (1, 2)]
    wanted = msgspec.structs.replace(
        SQUARE,
        token=image_models.IMAGE_PAD,
        placeholder=image_models.GEMMA_MARKS[0],
        text=multimodal.TEXT,
    )
    loaded = [LoadedImage(count, image_models.SIDE, image_models.SIDE, one.placed(0).digest) for one in pictures]
    ids = tokenizer.backend_tokenizer.encode(str(with_marks(text, wanted)), add_special_tokens=False).ids
    [expected] = prepare(images=[one.original for one in pictures], text=text)["input_ids"]
    assert placed(ids, loaded, wanted)[0] == expected


def in_format(image: Image.Image, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


RED, GREY = (255, 0, 0), (156, 156, 156)
PALETTE = Image.new("P", (8, 8))
PALETTE.putpalette([*RED, 0, 255, 0])
FRAMES = [Image.new("RGB", (8, 8), (0, 0, colour)) for colour in (200, 255)]


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        (in_format(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), None),
        (in_format(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), RED),
        (in_format(Image.fromarray(np.full((8, 8), 40_000, np.uint16)), "PNG"), GREY),
        (in_format(PALETTE, "PNG"), RED),
        (in_format(PALETTE, "PNG", transparency=0), (255, 255, 255)),
        (in_format(Image.new("LA", (8, 8), (10, 0)), "PNG"), (255, 255, 255)),
        (in_format(Image.new("RGB", (8, 8), RED), "GIF", save_all=True, append_images=FRAMES), RED),
        (in_format(Image.new("RGB", (8, 8), RED), "WEBP", save_all=True, append_images=FRAMES, lossless=True), RED),
    ],
    ids=["tiff", "cmyk", "16-bit", "palette", "transparent-palette", "grey-alpha", "animated-gif", "animated-webp"],
)
def test_colours_of_each_kind(data: bytes, colour: tuple[int, int, int] | None) -> None:
    """The first frame in 8 bits of red, green and blue; other formats are refused whatever the client calls them."""
    if colour is None:
        with pytest.raises(ImageRefused, match="none that can be read"):
            decoded(Job(data, WANTED, ROOM))
        return
    pixels = np.frombuffer(decoded(Job(data, WANTED, ROOM)).pixels, np.uint8).reshape(-1, 3)
    assert np.abs(pixels.astype(int) - colour).max() <= 1


@pytest.mark.parametrize("change", ["lines", "no-padding", "none"])
def test_base64_as_clients_write_it(change: str) -> None:
    """With line breaks, as `base64.encodebytes` and MIME have them, and without padding."""
    text = base64.b64encode(b"some bytes of 25 as it is").decode()
    given = {"lines": f" {text[:8]}\r\n{text[8:]}\n", "no-padding": text.rstrip("="), "none": text}[change]
    assert text.endswith("=") and data_of(ImageSource(f"data:image/png;base64,{given}", "here"), 100)[:4] == b"some"


def test_transparency_and_orientation_are_those_of_transformers() -> None:
    image = Image.new("RGBA", (16, 8), (10, 20, 30, 0))
    data = io.BytesIO()
    image.save(data, "PNG")
    assert set(decoded(Job(data.getvalue(), WANTED, ROOM)).pixels) == {255}
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.convert("RGB").save(turned, "JPEG", exif=exif)
    picture = decoded(Job(turned.getvalue(), WANTED, ROOM))
    assert (picture.height, picture.width) == (16, 8)
