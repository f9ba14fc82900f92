"""How far the download of a file is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_MB, _GB = 10**6, 10**9


class Downloaded(NamedTuple):
    """The bytes of a file that are there, and all of them."""

    file: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"downloading {self.file}: {100 * self.done / max(1, self.total):.0f} % of {_size(self.total)}"


Tell = Callable[[Downloaded], None]
"""Gets the progress of a download."""


def _size(count: float) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / _MB:.1f} MB"
