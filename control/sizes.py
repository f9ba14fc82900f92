"""Numbers of bytes, as people write and read them."""

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


def in_words(size: int) -> str:
    """A number of bytes as people read it: 512 KiB, 1.5 GiB.

    >>> in_words(1536)
    '1.5 KiB'
    """
    number, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
