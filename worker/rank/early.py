"""Compilation of the C++ library while torch is imported: by a rank that starts alone, or by the standby."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from control.errors import FurrowError
from control.messages import Assignment
from worker.native.library import load_library
from worker.repository.files import inspect
from worker.repository.kinds import kinds_of
from worker.selftest.shapes import of_config


def compile_beside() -> None:
    """Begin to compile the library that the rank of this process will load, in a thread."""
    threading.Thread(target=compile_now, name="compile early", daemon=True).start()


def compile_now() -> None:
    """Compile the library of the rank that this process's environment describes, if it needs one and there is none."""
    spec = msgspec.json.decode(os.environ["FURROW_ASSIGNMENT"], type=Assignment).spec
    if os.environ["FURROW_DEVICE"] == "cpu" and spec.dtype != "float64":
        with suppress(FurrowError):  # the load will say what is wrong with the files
            files = inspect(Path(os.environ["FURROW_FOLDER"]), images=False)
            kinds = kinds_of(files, spec.quant, spec.dequantize, spec.dtype)
            load_library(kinds, of_config(files.config, spec.dtype, spec.tp))
