"""Images in deceptive containers are taken out or refused: files that are cheap to send and dear to read, before
anything is decoded."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from api.images import containers, decoder
from api.images.containers import ImageRefused, essential
from api.images.decoder import decoded
from api.images.jobs import Job
from control.messages import ImageInput

WANTED = ImageInput(kind="grid", token=9, placeholder="<i>", unit=1, least_pixels=1, most_pixels=1 << 24, resample=3)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)).resize((80, 48))
TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'


def stored(kind: str, image: Image.Image = PICTURE, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def text(name: str, content: str, **options: Any) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "before it", zip=True)
    info.add_text(name, content, **options)
    return info


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def in_png(extra: bytes) -> bytes:
    """A PNG with chunks after its header."""
    whole = stored("PNG")
    return whole[:33] + extra + whole[33:]


def in_jpeg(extra: bytes) -> bytes:
    """A JPEG with segments at its beginning."""
    whole = stored("JPEG")
    return whole[:2] + extra + whole[2:]


def in_gif(extra: bytes) -> bytes:
    """A GIF with extensions before its first frame."""
    whole = stored("GIF", PICTURE.quantize(256))
    head = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:head] + extra + whole[head:]


def scans(number: int, width: int = 80, height: int = 48) -> bytes:
    """A progressive JPEG with so many scans: the last one is repeated, a few bytes each."""
    whole = stored("JPEG", Image.new("RGB", (width, height), (9, 90, 200)), progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * (number - whole.count(b"\xff\xda")) + whole[-2:]


def sized(jpeg: bytes, width: int, height: int) -> bytes:
    """A progressive JPEG whose header says these dimensions."""
    at = jpeg.index(b"\xff\xc2") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


FRAMES = [PICTURE.point(lambda value: 255 - value), PICTURE]
RAW_EXIF = TURNED.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        stored("JPEG"),
        stored("JPEG", progressive=True, exif=TURNED, comment=b"words", icc_profile=bytes(100_000)),
        stored("JPEG", restart_marker_blocks=1, subsampling=2),
        stored("JPEG", PICTURE.convert("CMYK")),
        stored("JPEG", xmp=XMP),
        stored("JPEG", exif=TURNED, xmp=XMP),
        stored("MPO", save_all=True, append_images=FRAMES),
        scans(containers.MOST_SCANS),
        stored("PNG", exif=TURNED, icc_profile=bytes(1000)),
        stored("PNG", pnginfo=text("XML:com.adobe.xmp", XMP.decode())),
        stored("PNG", pnginfo=text("Raw profile type exif", f"\nexif\n{len(RAW_EXIF):8}\n{RAW_EXIF.hex()}", zip=True)),
        stored("PNG", PICTURE.quantize(7), transparency=3, bits=4),
        stored("PNG", save_all=True, append_images=FRAMES),
        stored("PNG", save_all=True, append_images=FRAMES, default_image=True),
        stored("GIF", PICTURE.quantize(7), comment=b"words" * 100),
        stored("GIF", PICTURE.quantize(7), transparency=3, save_all=True, append_images=FRAMES, loop=0),
        stored("WEBP", exif=TURNED, lossless=True),
        stored("WEBP", save_all=True, append_images=FRAMES),
    ],
)
def test_the_pixels_are_those_of_the_whole_file(data: bytes) -> None:
    """In each format: colours, transparency and orientation as Pillow reads them from all of it."""
    direct = Image.open(io.BytesIO(data))
    expected = ImageOps.exif_transpose(direct).convert("RGBA")
    white = Image.new("RGBA", expected.size, (255, 255, 255, 255))
    whole = Image.alpha_composite(white, expected).convert("RGB")
    picture = decoded(Job(data, WANTED, 1 << 24))
    assert (picture.width, picture.height) == whole.size
    assert picture.pixels == whole.tobytes()


def decoding_s(data: bytes) -> float:
    began = time.process_time()
    decoded(Job(data, WANTED, 1 << 24))
    return time.process_time() - began


BOMB = b"name\0\0" + zlib.compress(bytes(1_000_000), 9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: in_png(chunk(b"iCCP", BOMB) * 50),
        lambda: in_png(chunk(b"abCd", b"") * 10_000),
        lambda: in_jpeg(b"\xff\xd0" * 100_000),
        lambda: in_jpeg(b"\xff\x00" * 100_000),
        lambda: in_jpeg(b"\xff" * 100_000),
        lambda: in_jpeg(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5000) * 30),
    ],
    ids=["profiles", "chunks", "restarts", "zeros", "fill", "photoshop"],
)
def test_what_pixels_do_not_need_costs_nothing(make: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """And is dear where the file is decoded as it was sent, which is the control."""
    data = make()
    decoding_s(data)
    cheap = min(decoding_s(data) for _ in range(3))
    monkeypatch.setattr(decoder, "essential", lambda data: data)  # pyright: ignore[reportUnknownLambdaType]
    assert decoding_s(data) > 2 * cheap


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: scans(containers.MOST_SCANS + 1), "has more than 100 scans"),
        (lambda: scans(3000), "has more than 100 scans"),
        (lambda: sized(scans(26), 6500, 6000), "has more than 25 scans, the most that are decoded of 39000000 pixels"),
        (lambda: stored("JPEG").replace(b"\xff\xc0", b"\xff\xc9"), "arithmetic coding: marker 0xc9"),
        (lambda: in_jpeg(segment(0xC0, struct.pack(">BHHB", 8, 48, 80, 0))), "two frame headers"),
        (lambda: in_jpeg(segment(0xFE, b"") * 5000), "more than 4000 segments"),
        (lambda: in_png(chunk(b"IDAT", b"") * 70_000), "more than 65536 chunks"),
        (lambda: in_png(chunk(b"IHDR", bytes(13))), "two headers"),
        (lambda: in_png(chunk(b"eXIf", bytes(300_000))), "300000 bytes of EXIF"),
        (lambda: stored("WEBP", exif=bytes(300_000)), "300000 bytes of EXIF"),
        (lambda: in_gif(b"!\xfe\x01x\0" * 40_000), "more than 65536 blocks"),
    ],
)
def test_what_is_refused_before_it_is_decoded(make: Callable[[], bytes], why: str) -> None:
    data = make()
    began = time.process_time()
    with pytest.raises(ImageRefused, match=why):
        decoded(Job(data, WANTED, 1 << 24))
    assert time.process_time() - began < 0.3


@pytest.mark.parametrize(
    "data",
    [
        stored("PNG", pnginfo=text("XML:com.adobe.xmp", XMP.decode() + " " * 300_000)),
        stored("WEBP", xmp=XMP + b" " * 300_000, lossless=True),
    ],
)
def test_xmp_of_too_many_bytes_is_not_read(data: bytes) -> None:
    """Some programs write megabytes of history there; the image is taken as its pixels are."""
    assert decoded(Job(data, WANTED, 1 << 24)).pixels == PICTURE.tobytes()


def test_scans_cost_time_where_they_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: 400 scans of a few bytes take several times what the image takes."""
    monkeypatch.setattr(containers, "MOST_SCANS", 10_000)
    many = scans(400, 800, 800)
    assert len(many) < 20_000
    assert decoding_s(many) > 5 * min(decoding_s(scans(10, 800, 800)) for _ in range(3))


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"GIF89a!"]
)
def test_a_file_that_ends_early_is_no_error_here(data: bytes) -> None:
    """Pillow tells what it lacks."""
    assert data.startswith(essential(data)[:6])
