"""How far a download is, told in words instead of by a bar on a terminal that nobody sees."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

Tell = Callable[[str], None]

EVERY_S = 0.5
_MB, _GB = 10**6, 10**9


def teller(tell: Tell, clock: Callable[[], float] = time.monotonic) -> type[tqdm[Any]]:
    """A bar for huggingface_hub that prints nothing: `tell` hears `downloading FILE: 40 % of 4.9 GB` now and then."""
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
                tell(f"downloading {self.desc or 'a file'}: {100 * self.n / self.total:.0f} % of {size(self.total)}")
            return shown

        def close(self) -> None:
            super().close()
            self._sink.close()

    return ToldBar


def size(count: float) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / _MB:.1f} MB"
