"""The progress of a download, for a callback instead of a bar on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

_MB = 10**6
_GB = 10**9


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


EVERY_S = 0.5


def teller(tell: Tell, file: str, clock: Callable[[], float] = time.monotonic) -> type[tqdm[Any]]:
    """A bar for huggingface_hub that prints nothing. `tell` is called every half second, and at the end of `file`; the
    library shortens its name."""
    told_at = -EVERY_S

    class ToldBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._sink = Path(os.devnull).open("w")  # noqa: SIM115 (a bar that is disabled would not count)
            super().__init__(*args, **{**options, "file": self._sink, "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal told_at
            shown = super().update(n)
            if self.total and (clock() - told_at >= EVERY_S or self.n >= self.total):
                told_at = clock()
                tell(Downloaded(file, int(self.n), int(self.total)))
            return shown

        def close(self) -> None:
            super().close()
            self._sink.close()

    return ToldBar
