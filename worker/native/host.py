"""Reasons why a host can't run the C++ products, found without torch and without compiling."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from control.errors import SettingsError
from worker.native import compiled
from worker.native.compiled import processor_flags

SOURCE = compiled.KERNELS
SWITCH = "FURROW_NATIVE"
"""Environment variable; with 0 the reference in torch computes everything."""

NEEDED: dict[str, tuple[str, ...]] = {"x86_64": ("avx2", "fma", "f16c"), "aarch64": ("asimd",), "arm64": ()}
"""By machine, the flags of a processor that the library needs at least."""


INSTEAD = "Leave it out: torch then computes in float32, several times slower."
"""Remedy for an option of `--quant`."""


INSTALL = "Install one on this host (`apt-get install g++`), then run `furrow models reload`."


def check_host(option: str, remedy: str) -> None:
    """Raise SettingsError naming `option`, which only C++ computes, and `remedy`, where this host can't run it."""
    if (reason := unavailable()) is not None:
        install = f"{INSTALL} Or: " if reason == compiled.NO_COMPILER else ""
        raise SettingsError(f"{option} is computed in C++ only, but {reason}. {install}{remedy}")


def unavailable() -> str | None:
    """The reason, or None where the library should compile. Compiling may still fail."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    machine = platform.machine()
    if machine not in NEEDED:
        return f"the kernels are written for {' and '.join(NEEDED)}, and this processor is {machine}"
    if missing := [name for name in NEEDED[machine] if name not in processor_flags()]:
        return f"this processor ({machine}) has no {', '.join(missing)}"
    if compiled.compiler_command() is None and not compiled.is_there(SOURCE):
        return compiled.NO_COMPILER
    return None


def to_be_compiled() -> bool:
    """True where this host runs the library, and has none of this version yet."""
    return unavailable() is None and not compiled.is_there(SOURCE)


WIDE = ("avx512f", "avx512bw", "avx512vl")


def panel_outputs() -> int:
    """The outputs whose weights the library packs together on this processor, without loading it."""
    return 32 if set(WIDE) <= processor_flags() else 16


def thread_count() -> int:
    """The threads that a model computes with here: those that torch has where it is imported, else OMP_NUM_THREADS,
    else one for each core that this process may use."""
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        return torch.get_num_threads()  # type: ignore[union-attr]  # a module
    try:
        return max(1, int(os.environ.get("OMP_NUM_THREADS", "")))
    except ValueError:
        return max(1, len({_core(cpu) for cpu in os.sched_getaffinity(0)}))


def _core(cpu: int) -> str:
    """A name that the threads of one core share."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)
