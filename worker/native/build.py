"""The library of the C++ products and forwards, compiled with the kinds of weights that a model has; no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from worker.formats.kinds import ALL, bits_of
from worker.native import compiled
from worker.native.host import SOURCE, SWITCH
from worker.verdicts import switches
from worker.verdicts.shapes import Shapes


def build(kinds: Iterable[str] | None = None, shapes: Shapes | None = None) -> ctypes.CDLL | None:
    """The loaded library, which has at least `kinds`, or all, and passed its check with `shapes`; None where it can't
    be compiled, or isn't wanted. May take seconds the first time, and as many more the fewer kinds were asked for
    before."""
    if os.environ.get(SWITCH) == "0" or switches.reason_off("cpp"):
        return None
    parts = ALL if kinds is None else bits_of(kinds)
    return compiled.library(
        SOURCE, for_this_processor=True, parts=parts, shapes=() if shapes is None else shapes.on_cpu
    )


def reason_missing() -> str:
    """Why `build` returned None, as part of a sentence; "" where it did not, or was not called."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return switches.reason_off("cpp") or compiled.reason(SOURCE)
