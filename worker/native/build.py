"""The library of the C++ products and forwards, compiled with the kinds of weights that a model has; no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from worker.formats.kinds import ALL, bits_of
from worker.native import compiled
from worker.native.host import SWITCH
from worker.verdicts import switches

SOURCE = Path(__file__).parent / "source" / "native.cpp"


def build(kinds: Iterable[str] | None = None) -> ctypes.CDLL | None:
    """The loaded library, which has at least `kinds`, or all; None where it can't be compiled, or isn't wanted. May
    take seconds the first time, and as many more the fewer kinds were asked for before."""
    if os.environ.get(SWITCH) == "0" or switches.reason_off("cpp"):
        return None
    return compiled.library(SOURCE, for_this_processor=True, parts=ALL if kinds is None else bits_of(kinds))


def reason_missing() -> str:
    """Why `build` returned None, as part of a sentence; "" where it did not, or was not called."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return switches.reason_off("cpp") or compiled.reason(SOURCE)
