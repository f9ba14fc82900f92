"""Takes out of an image's file the parts that its pixels need, before it is decoded.

A file can be cheap to send and expensive to read: thousands of scans of a progressive JPEG, compressed colour profiles,
millions of empty chunks or comments. Scans are counted here, and everything that pixels do not depend on is left out:
the decoder gets the image and its orientation, and no other frame, thumbnail, profile or comment.
"""

from __future__ import annotations

import re

MOST_SCANS = 100
"""Of a progressive JPEG. Encoders write 10, and with a search for the best some 20."""
MOST_SCAN_PIXELS = 1_000_000_000
"""Scans times pixels: an empty scan takes 1.3 ns a pixel."""
MOST_SEGMENTS = 4_000
"""Of a JPEG, between and before its scans."""
MOST_CHUNKS = 65_536
"""Of a PNG: 20 MiB in parts of 320 bytes."""
MOST_BLOCKS = 65_536
"""Of the extensions before a GIF's first frame."""
MOST_METADATA = 256 * 1024
"""Bytes of the EXIF that the orientation is read from. XMP of more bytes is left out: few programs write it there."""


class ImageRefused(Exception):
    """An image that is refused; the text gives the reason, and follows the image's name in a sentence."""


def essential(data: bytes) -> bytes:
    """The file without what its first frame's pixels and orientation do not depend on. A file of another format, and
    WebP, whose chunks cost little, is returned as it is. Raises ImageRefused."""
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith(_PNG_SIGNATURE):
        return _png(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _gif(data)
    return data


def check_exif(size: int) -> None:
    """Raise ImageRefused for EXIF of too many bytes."""
    if size > MOST_METADATA:
        raise ImageRefused(f"has {size} bytes of EXIF; at most {MOST_METADATA} are read")


_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
"""As libjpeg finds the next one, in a scan and outside: those without a body (restarts) are passed over."""
_EOI = 0xD9
_SOS = 0xDA
_FRAMES = range(0xC0, 0xC3)
"""Baseline, extended and progressive, with Huffman codes."""
_OTHER_FRAMES = {*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}
_TABLES = {0xC4, 0xDB, 0xDD}
"""Huffman codes, quantization, interval of restarts."""
_APPLICATION = {0xE0: (b"JFIF\0",), 0xE1: (b"Exif\0", b"http://ns.adobe.com/xap/1.0/\0"), 0xEE: (b"Adobe",)}
"""Colours and orientation: the first segment with each of these heads is kept."""


def _jpeg(data: bytes) -> bytes:
    pieces: list[bytes] = [data[:2]]
    heads: set[bytes] = set()
    segments = scans = pixels = 0
    match = _MARKER.search(data, 2)
    while match is not None:
        marker = data[match.end() - 1]
        if marker == _EOI:
            pieces.append(data[match.start() : match.end()])
            break
        if (segments := segments + 1) > MOST_SEGMENTS:
            raise ImageRefused(f"has more than {MOST_SEGMENTS} segments; save it again without them")
        end = match.end() + max(2, int.from_bytes(data[match.end() : match.end() + 2]))
        body = data[match.end() + 2 : end]
        following = _MARKER.search(data, end)
        if marker in _OTHER_FRAMES:
            raise ImageRefused(
                f"is a JPEG of a rare kind (lossless, hierarchical or arithmetic coding: marker {marker:#x}); save it "
                "as a baseline or progressive one"
            )
        if marker in _FRAMES:
            if pixels:
                raise ImageRefused("is damaged: it has two frame headers")
            pixels = max(1, int.from_bytes(body[1:3]) * int.from_bytes(body[3:5]))
        elif marker == _SOS:
            scans += 1
            _check_scans(scans, pixels)
            end = following.start() if following is not None else len(data)
        elif marker in _APPLICATION:
            head = next(
                (prefix for prefix in _APPLICATION[marker] if body.startswith(prefix) and prefix not in heads), None
            )
            if head is None:
                match = following
                continue
            heads.add(head)
        elif marker not in _TABLES:
            match = following
            continue
        pieces.append(data[match.start() : end])
        match = following
    return b"".join(pieces)


def _check_scans(scans: int, pixels: int) -> None:
    if scans > MOST_SCANS:
        raise ImageRefused(f"has more than {MOST_SCANS} scans, which no encoder writes; save it again")
    if scans * pixels > MOST_SCAN_PIXELS:
        raise ImageRefused(
            f"has more than {MOST_SCAN_PIXELS // pixels} scans, the most that are decoded of {pixels} pixels; save it "
            "as a baseline JPEG"
        )


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ONCE = {b"IHDR", b"PLTE", b"tRNS", b"eXIf"}
_TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
_ORIENTATION = (b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Keywords of the texts that the orientation may be in."""


def _png(data: bytes) -> bytes:
    pieces: list[bytes] = [_PNG_SIGNATURE]
    once: set[bytes] = set()
    start = len(_PNG_SIGNATURE)
    chunks = 0
    while start < len(data):
        if (chunks := chunks + 1) > MOST_CHUNKS:
            raise ImageRefused(f"has more than {MOST_CHUNKS} chunks; save it again")
        kind = data[start + 4 : start + 8]
        end = start + 12 + int.from_bytes(data[start : start + 4])
        if kind == b"IDAT":
            pieces.append(data[start:end])
        elif kind == b"IEND":
            pieces.append(data[start:end])
            break
        elif kind in _ONCE or kind in _TEXTS:
            name = kind if kind in _ONCE else data[start + 8 : start + 88].partition(b"\0")[0]
            if name == b"IHDR" and name in once:
                raise ImageRefused("is damaged: it has two headers")
            size = end - start - 12
            if kind == b"eXIf":
                check_exif(size)
            is_kept = kind in _ONCE or (name in _ORIENTATION and size <= MOST_METADATA)
            if is_kept and name not in once:
                once.add(name)
                pieces.append(data[start:end])
        start = end
    return b"".join(pieces)


_EXTENSION = 0x21
_CONTROL = 0xF9


def _gif(data: bytes) -> bytes:
    """Everything but the extensions before the first frame, of which the last control of graphics is kept."""
    start = head = 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    control = b""
    blocks = 0
    while start + 1 < len(data) and data[start] == _EXTENSION:
        begin = start
        label = data[start + 1]
        start += 2
        while start < len(data):
            if (blocks := blocks + 1) > MOST_BLOCKS:
                raise ImageRefused(f"has more than {MOST_BLOCKS} blocks before its first frame; save it again")
            size = data[start]
            start += 1 + size
            if not size:
                break
        if label == _CONTROL:
            control = data[begin:start]
    return data[:head] + control + data[start:]
