"""C++ libraries: those that the package brought, else sources compiled on the host, once for each version
of a source, and kept in the user's cache.

A source may have parts, of which a library has those that were asked for: less is compiled. A library with more parts
takes the place of one with fewer.

A library for this processor is kept once it has passed its own check in a child process, because on some virtual
machines a processor's flags promise instructions that fault. If it fails, it is compiled with fewer instructions. The
check is repeated once for the shapes of each model.
Without a compiler, or if all fails, callers use another implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from control import cache as cache_files

log = structlog.get_logger()


# Libraries that a wheel brings, compiled by `python -m ops.wheels` for several kinds of processors.
#
# A checkout and an sdist have none: their sources are compiled on the host.


KERNELS = Path(__file__).parent / "source" / "native.cpp"
EXCHANGE = Path(__file__).parents[1] / "collective" / "exchange.cpp"
FOLDER = Path(__file__).parent / "built"


@dataclass(frozen=True)
class InstructionSet:
    """A set of instructions: its name, the processor's flags that it needs as Linux lists them, and the compiler's
    arguments."""

    name: str
    needs: tuple[str, ...]
    arguments: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

VARIANTS: dict[str, tuple[InstructionSet, ...]] = {
    "x86_64": (
        InstructionSet("avx512-vnni", (*_AVX512, "avx512_vnni"), ("-mcpu=x86_64_v4+avx512vnni",)),
        InstructionSet("avx512", _AVX512, ("-mcpu=x86_64_v4",)),
        InstructionSet("avx2-vnni", (*_AVX2, "avx_vnni"), ("-mcpu=x86_64_v3+avxvnni",)),
        InstructionSet("avx2", _AVX2, ("-mcpu=x86_64_v3",)),
    ),
    "aarch64": (
        InstructionSet("neon-i8mm", ("asimddp", "i8mm"), ("-mcpu=generic+dotprod+i8mm",)),
        InstructionSet("neon-dot", ("asimddp",), ("-mcpu=generic+dotprod",)),
        InstructionSet("neon", ("asimd",), ("-mcpu=generic",)),
    ),
    "arm64": (InstructionSet("neon-dot", (), ("-mcpu=apple_m1",)),),  # as macOS calls it, which lists no flags here
}
"""By machine, the best first. The sources use no instructions for products of 16-bit floats."""

ANY = InstructionSet("any", (), ())
"""Of a source that is compiled alike for all processors of a machine."""


def file_name(source: Path, variant: InstructionSet) -> str:
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


FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
_OPTIMIZED = ("-O2",)
"""Sources for this processor say themselves what is unrolled and how vectors are used; -O3 takes half as long again. At
-O1 GCC unrolls loops so late that small arrays of vectors stay in memory."""
_NEWER = ("avx512fp16", "avx512bf16", "avx512vnni", "avxvnni", "amx-tile", "amx-int8", "amx-bf16")
_ARM = {"all": ("-march=native", *_OPTIMIZED), "NEON": ("-march=armv8-a", *_OPTIMIZED)}
_X86 = {
    "all": ("-march=native", *_OPTIMIZED),
    "no VNNI, 16-bit arithmetic or AMX": ("-march=native", *(f"-mno-{name}" for name in _NEWER), *_OPTIMIZED),
    "AVX2": ("-mavx2", "-mfma", "-mf16c", *_OPTIMIZED),
}
INSTRUCTIONS: dict[str, tuple[str, ...]] = _ARM if platform.machine() == "aarch64" else _X86
"""Instructions of the processor that a library may use → the compiler's flags, tried in this order."""
COMPILE_WITHIN_S = 110.0
"""Some five times what all kinds of weights take on an idle core: a compiler on a busy host is slow, and no failure.
Less than what the leader grants a load that stands still."""
CHECK_WITHIN_S = 20.0
_TOO_LONG = "its check did not end"
_CHECK = """
import ctypes, sys
check, shapes = ctypes.CDLL(sys.argv[1]).furrow_check, [int(one) for one in sys.argv[2:]]
check.restype = ctypes.c_char_p
wrong = check((ctypes.c_int64 * len(shapes))(*shapes), ctypes.c_int64(len(shapes)))
sys.exit(wrong.decode() if wrong else 0)
"""


class CheckFailed(Exception):
    """A library does not work on this processor; the message says how that was seen."""


_ALL_PARTS = -1
"""As a set of bits."""
_libraries: dict[Path, list[tuple[int, ctypes.CDLL | None]]] = {}
"""By source, the libraries of this process with their parts; None for parts that can't be had."""
_reasons: dict[Path, str] = {}
"""By source, why the last attempt gave no library."""
_lock = threading.Lock()


def load(
    source: Path, *, for_this_processor: bool = False, parts: int | None = None, shapes: tuple[int, ...] = ()
) -> ctypes.CDLL | None:
    """The loaded library of `source` and the headers below its folder; None if it can't be compiled, or fails its check
    with any set of instructions. May take some seconds the first time. A library for this processor does not run on a
    lesser one; it exports `furrow_check`, which takes `shapes` with their count and returns null or the first wrong
    result. `parts` is a set of bits, at least which the library has: the source finds them in FURROW_KINDS. A library
    that the package brought has all parts."""
    needed = parts or 0
    with _lock:
        libraries = _libraries.setdefault(source, [])
        for library_parts, loaded in libraries:
            if (library_parts & needed == needed) if loaded is not None else (library_parts & needed == library_parts):
                return loaded
        library_parts = _ALL_PARTS
        loaded = _brought(source, for_this_processor, shapes)
        if loaded is None:
            library_parts, loaded = _first(source, INSTRUCTIONS if for_this_processor else {"": ()}, parts, shapes)
        libraries.append((library_parts, loaded))
        return loaded


def reason(source: Path) -> str:
    """The reason why `load` returned None for `source`, with the remedy, as part of a sentence; "" if it did not."""
    return _reasons.get(source, "")


NO_COMPILER = "there is no C++ compiler (c++, g++ or clang++, or CXX)"


def compiler_command() -> str | None:
    """The command of the C++ compiler; None where there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compiler_missing() -> bool:
    """True where no compiler can be run here: another try to compile would end alike."""
    command = compiler_command()
    return command is None or shutil.which(command) is None


def is_there(source: Path) -> bool:
    """True if the package brought a library of this version of a source for this processor, or the cache has one with
    any of its parts."""
    if builds(source, for_this_processor=True):
        return True
    stems = (_stem(source, flags) for flags in INSTRUCTIONS.values())
    return any(any(cache_files.folder("compiled").glob(f"{stem}*.so")) for stem in stems)


def _brought(source: Path, for_this_processor: bool, shapes: tuple[int, ...]) -> ctypes.CDLL | None:
    """The best library that the package brought and that passes its check; None where there is none."""
    for path in builds(source, for_this_processor):
        try:
            if for_this_processor:
                _check_kept(path, shapes, cache_files.folder("compiled") / f"{path.stem}-{_host()}.so")
            loaded = ctypes.CDLL(str(path))
        except CheckFailed as error:
            _log_failure(path.stem, str(error))
        except OSError as error:
            log.warning("a library of the package can't be loaded", path=str(path), error=str(error), action="load")
        else:
            _reasons[source] = ""
            return loaded
    return None


def _host() -> str:
    """Twelve hexadecimal digits of this processor and its C library, on which a verdict depends."""
    words = f"{_processor()}|{platform.libc_ver()[1]}"
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _log_failure(instructions: str, reason: str) -> None:
    log.warning(
        "C++ code fails on this processor",
        instructions=instructions,
        reason=reason,
        remedy="fewer instructions are used, or torch; please report this line and the processor's name",
        action="check_library",
    )


def _first(
    source: Path, variants: Mapping[str, tuple[str, ...]], parts: int | None, shapes: tuple[int, ...]
) -> tuple[int, ctypes.CDLL | None]:
    """The first of the variants (instructions → the compiler's flags) that compiles and passes its check, after its
    parts."""
    for instructions, flags in variants.items():
        try:
            library_parts, loaded = _load(source, flags, parts, shapes)
            _reasons[source] = "" if loaded is not None else NO_COMPILER
            return library_parts, loaded
        except CheckFailed as error:
            _reasons[source] = f"the compiled code does not work on this processor: {error}"
            _log_failure(instructions, str(error))
        except (OSError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", None) or b"").decode()[-2000:]
            _reasons[source] = _described(error)
            log.warning(
                "compilation failed",
                source=source.name,
                reason=_reasons[source],
                error=str(error),
                output=output,
                action="compile",
            )
            if not isinstance(error, subprocess.CalledProcessError):
                break
    return parts or 0, None


def _described(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return (
            f"the C++ compiler did not end within {error.timeout:g} s; start it again when this host has less other "
            "work, or with more processors"
        )
    if isinstance(error, subprocess.CalledProcessError):
        return "the C++ compiler failed, with an output that this rank's log has"
    return f"the C++ compiler could not be run: {error}"


def _load(
    source: Path, more_flags: tuple[str, ...], parts: int | None, shapes: tuple[int, ...]
) -> tuple[int, ctypes.CDLL | None]:
    """Raises CheckFailed, OSError or SubprocessError; None without a compiler."""
    compiler = compiler_command()
    needed = parts or 0
    stem = _stem(source, more_flags)
    name = f"{stem}.so" if parts is None else f"{stem}-{parts:x}.so"
    refused = (cache_files.folder("compiled") / name).with_suffix(".refused")
    compiled = _kept(stem, needed)
    if compiled is None:
        if refused.exists():
            raise CheckFailed(refused.read_text().strip())
        if compiler is None:
            return needed, None
        try:
            folder = cache_files.made_folder("compiled")
        except OSError:  # a home that can't be written to: compiled anew by each process
            folder = None
        with _locked(folder), cache_files.scratch(folder) as scratch:
            compiled = _kept(stem, needed)
            if compiled is None:  # else another process compiled it meanwhile
                fresh = scratch / name
                _compile(source, compiler, more_flags, parts, fresh)
                if more_flags and (reason := failure(fresh, shapes)):
                    if folder is not None:
                        refused.write_text(f"{reason}\n")
                    raise CheckFailed(reason)
                if folder is None:
                    return needed, ctypes.CDLL(str(fresh))
                compiled = needed, fresh.replace(folder / name)  # whole or not at all
                if shapes:
                    _verdict(folder / name, shapes).write_text("")
    library_parts, built = compiled
    if shapes:
        _check_kept(built, shapes, built)
    cache_files.mark_used(built)
    return library_parts, ctypes.CDLL(str(built))


def _stem(source: Path, more_flags: tuple[str, ...]) -> str:
    """The begin of the names of a source's libraries: all that they depend on but their parts."""
    words = (
        *contents(source),
        " ".join(FLAGS + more_flags).encode(),
        (_processor() if more_flags else platform.machine()).encode(),
        platform.libc_ver()[1].encode(),
    )
    return f"{source.stem}-{hashlib.sha256(b'|'.join(words)).hexdigest()[:24]}"


def _compile(source: Path, compiler: str, more_flags: tuple[str, ...], parts: int | None, built: Path) -> None:
    """Raises OSError or SubprocessError."""
    # Hidden: the loader would give a library the tables of another one in the process, which has other parts.
    part_flags = () if parts is None else ("-fvisibility=hidden", f"-DFURROW_KINDS={parts:#x}")
    command = [compiler, *FLAGS, *more_flags, *part_flags, "-o", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_WITHIN_S)


def _kept(stem: str, needed: int) -> tuple[int, Path] | None:
    """The smallest library in the cache that has the parts `needed`, after its parts."""
    libraries: list[tuple[int, Path]] = []
    for path in cache_files.folder("compiled").glob(f"{stem}*.so"):
        parts = path.stem[len(stem) + 1 :]
        libraries.append((int(parts, 16) if parts else 0, path))
    having = [(parts.bit_count(), parts, path) for parts, path in libraries if parts & needed == needed]
    return min(having)[1:] if having else None


def _check_kept(built: Path, shapes: tuple[int, ...], name: Path) -> None:
    """Raises CheckFailed if a library fails with these shapes. Tried once, by one process; the verdict is kept in the
    cache beside `name`, but for a check that took too long: the host was busy."""
    verdict = _verdict(name, shapes)
    if (reason := _read(verdict)) is None:
        with contextlib.suppress(OSError):
            name.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(name.parent if os.access(name.parent, os.W_OK) else None):
            if (reason := _read(verdict)) is None:
                reason = failure(built, shapes)
                if not reason.startswith(_TOO_LONG):
                    with contextlib.suppress(OSError):  # a cache that can't be written to: tried anew by each process
                        verdict.write_text(reason)
    if reason:
        raise CheckFailed(reason)
    cache_files.mark_used(verdict)


def _read(verdict: Path) -> str | None:
    try:
        return verdict.read_text()
    except OSError:
        return None


def _verdict(built: Path, shapes: tuple[int, ...]) -> Path:
    """The file that is empty if the library passed its check with these shapes, else has the reason."""
    return built.with_suffix(f".{hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}.checked")


def failure(built: Path, shapes: tuple[int, ...] = (), within_s: float = CHECK_WITHIN_S) -> str:
    """The reason why the library `built` does not work on this processor; "" if it does. Its check runs in a child
    process, which an instruction that faults ends, and imports nothing but ctypes."""
    # -I and -S: neither the environment nor site-packages are read, so the child is there within milliseconds.
    command = [sys.executable, "-I", "-S", "-c", _CHECK, str(built), *map(str, shapes)]
    try:
        child = subprocess.run(command, capture_output=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return f"{_TOO_LONG} within {within_s:g} s"
    if child.returncode < 0:
        return f"its check ended by {signal.Signals(-child.returncode).name}"
    lines = child.stderr.decode(errors="replace").strip().splitlines()
    return (lines or [f"its check ended with status {child.returncode}"])[-1] if child.returncode else ""


def _locked(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """The lock under which one rank of a host compiles; none without a folder to write to."""
    return contextlib.nullcontext() if folder is None else cache_files.locked(folder)


def _processor() -> str:
    """The kind of processor and all that it can do, which a cluster's shared home may meet several of."""
    fields = ("model name", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(fields))
