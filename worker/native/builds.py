"""Libraries that a wheel brings, compiled by `python -m ops.wheels` for several kinds of processors.

A checkout and an sdist have none: their sources are compiled on the host (compiled.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent / "source" / "native.cpp"
EXCHANGE = Path(__file__).parents[1] / "collective" / "exchange.cpp"
FOLDER = Path(__file__).parent / "built"


@dataclass(frozen=True)
class Variant:
    """A set of instructions: its name, the processor's flags that it needs as Linux lists them, and the compiler's
    arguments."""

    name: str
    needs: tuple[str, ...]
    arguments: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant("avx512-vnni", (*_AVX512, "avx512_vnni"), ("-mcpu=x86_64_v4+avx512vnni",)),
        Variant("avx512", _AVX512, ("-mcpu=x86_64_v4",)),
        Variant("avx2-vnni", (*_AVX2, "avx_vnni"), ("-mcpu=x86_64_v3+avxvnni",)),
        Variant("avx2", _AVX2, ("-mcpu=x86_64_v3",)),
    ),
    "aarch64": (
        Variant("neon-i8mm", ("asimddp", "i8mm"), ("-mcpu=generic+dotprod+i8mm",)),
        Variant("neon-dot", ("asimddp",), ("-mcpu=generic+dotprod",)),
        Variant("neon", ("asimd",), ("-mcpu=generic",)),
    ),
    "arm64": (Variant("neon-dot", (), ("-mcpu=apple_m1",)),),  # as macOS calls it, which lists no flags here
}
"""By machine, the best first. The sources use no instructions for products of 16-bit floats."""

ANY = Variant("any", (), ())
"""Of a source that is compiled alike for all processors of a machine."""


def file_name(source: Path, variant: Variant) -> str:
    """The name of the library of this version of a source."""
    return f"{source.stem}-{digest(source)}-{variant.name}.so"


def digest(source: Path) -> str:
    """Twelve hexadecimal digits of a source with the headers below its folder."""
    return hashlib.sha256(b"|".join(contents(source))).hexdigest()[:12]


def contents(source: Path) -> list[bytes]:
    """A source and the headers below its folder."""
    return [source.read_bytes(), *(header.read_bytes() for header in sorted(source.parent.rglob("*.h")))]


def builds(source: Path, for_this_processor: bool) -> list[Path]:
    """The libraries of this version of a source whose instructions this processor lists, the best first; empty where
    the package brought none. A processor may list instructions that fault: each is tried before it is used."""
    if not FOLDER.is_dir():
        return []
    variants = VARIANTS.get(platform.machine(), ()) if for_this_processor else (ANY,)
    flags = processor_flags() if for_this_processor else frozenset[str]()
    paths = [FOLDER / file_name(source, variant) for variant in variants if flags.issuperset(variant.needs)]
    return [path for path in paths if path.is_file()]


_ARM_FLAGS = ((16, {"asimd": 1 << 1, "asimddp": 1 << 20}), (26, {"i8mm": 1 << 13}))
"""Entries of the kernel's auxiliary vector (AT_HWCAP, AT_HWCAP2) and what their bits mean."""


def processor_flags() -> frozenset[str]:
    """Names of the instruction sets as Linux has them; empty where it does not tell them."""
    if platform.machine() == "aarch64":  # /proc/cpuinfo is that of another processor in an emulator
        entry = ctypes.CDLL(None).getauxval
        entry.argtypes = [ctypes.c_ulong]
        entry.restype = ctypes.c_ulong
        sets = [(entry(number), flags) for number, flags in _ARM_FLAGS]
        return frozenset(name for value, flags in sets for name, bit in flags.items() if value & bit)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(listed, ()))
