"""Numbers of bytes and of seconds, as people write and read them."""

from __future__ import annotations

import re

from control.errors import SettingsError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_EXPONENTS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Bytes of `512MiB`, `4G` or `1073741824`. Units are powers of 1024. Raises SettingsError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
    return round(float(match[1]) * 1024 ** _EXPONENTS[(match[2] or "").upper()])


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Seconds of `2s`, `500ms`, `10m`, `1.5h` or `30`. Raises SettingsError."""
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise SettingsError(f"{text!r} is not a time: write seconds, or a number with ms, s, m or h")
    return float(match[1]) * _SECONDS[match[2]]


def in_words(size: int) -> str:
    """A number of bytes as people read it: 512 KiB, 1.5 GiB.

    >>> in_words(1536)
    '1.5 KiB'
    """
    number = float(size)
    unit = "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
