"""Kernels for aarch64 work in an emulator: their own check, and the bits of products beside those of x86.

Optional (`.ci/wheels`): it takes the package ziglang as compiler and the program qemu-aarch64.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worker.native.compiled import KERNELS, VARIANTS, InstructionSet

PRODUCTS = Path(__file__).parent / "arm" / "products.cpp"
COMMON = ("-std=c++17", "-O1", "-g0")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: pip install ziglang"
    ),
    pytest.mark.skipif(
        shutil.which("qemu-aarch64") is None, reason="there is no qemu-aarch64: apt-get install qemu-user"
    ),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the products are compared with those of x86-64"),
]


def output(program: Path, *emulator: str) -> dict[str, str]:
    """What the program prints: the first word of a line → the rest."""
    run = subprocess.run([*emulator, program], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())  # type: ignore[arg-type]  # pairs


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of AVX2, the least that x86 has, by this machine's own compiler."""
    program = tmp_path_factory.mktemp("x86") / "products"
    arguments = ["-mavx2", "-mfma", "-mf16c", "-I", KERNELS.parent, "-o", program, PRODUCTS, "-lpthread"]
    subprocess.run(["c++", *COMMON, *arguments], check=True, timeout=600)
    return output(program)


@pytest.mark.parametrize("variant", VARIANTS["aarch64"], ids=lambda variant: variant.name)
def test_products_have_the_bits_of_x86(variant: InstructionSet, expected: dict[str, str], tmp_path: Path) -> None:
    """Of every kind of weights, floats too, as the vectors are equally wide; for one row, a few and many. Each set of
    instructions passes the check that a library passes before it is used."""
    program, compiled = tmp_path / "products", tmp_path / "object.o"
    # musl goes into the program, so that the emulator needs no other file; it is made once, as it is linked apart.
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    compile_only = ["-c", *variant.arguments, "-I", KERNELS.parent, "-o", compiled, PRODUCTS]
    subprocess.run([*compiler, *COMMON, *compile_only], check=True, timeout=600)
    subprocess.run([*compiler, "-g0", "-static", "-o", program, compiled], check=True, timeout=600)
    products = output(program, "qemu-aarch64", "-cpu", "max")
    assert products.pop("build").startswith("NEON") and expected["build"].startswith("AVX2")
    assert products.pop("check") == "passed"
    assert len(products) == 3 * 15
    assert products == {name: digest for name, digest in expected.items() if name not in ("build", "check")}
