"""Compilation of the C++ library while a rank imports torch."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from control.errors import FurrowError
from control.messages import Assignment
from worker.native.build import build
from worker.repository.files import inspect
from worker.repository.quantization.kinds import kinds_of

DTYPES = ("auto", "float32")
"""Those that the library computes in."""


def compile_early() -> None:
    """Begin to compile the library that the rank of this process will load, in a thread."""
    assignment = msgspec.json.decode(os.environ["FURROW_ASSIGNMENT"], type=Assignment)
    if os.environ["FURROW_DEVICE"] == "cpu" and assignment.spec.dtype in DTYPES:
        threading.Thread(target=_compile, args=[assignment], name="compile early", daemon=True).start()


def _compile(assignment: Assignment) -> None:
    spec = assignment.spec
    with suppress(FurrowError):  # the load will say what is wrong with the files
        build(kinds_of(inspect(Path(os.environ["FURROW_FOLDER"]), images=False), spec.quant, spec.dequantize))
