"""Compiles every kernel for a GPU without having one, and says what it takes of it.

`python -m ops.bench.engine.kernels --arch 90` (Hopper; 80 is Ampere, 89 Ada, 100 Blackwell). Triton's interpreter,
which the tests use, knows neither types nor shared memory: what it accepts may still not compile. So TRITON_INTERPRET
must not be set.
"""

# pyright: reportPrivateUsage=false
# The kernels are private to their modules, whose functions launch them.

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import torch

from ops.harness.program import with_options

INDEX_ARGUMENTS = re.compile(r"(_head|_token|_row|_stride|^window|^inner)$")
INTEGER_POINTERS = {"tables": "*i32", "tiles": "*i32", "owners": "*i64", "positions": "*i64", "singles": "*i64"}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUMBERS = {"scale", "cap", "eps"}


@dataclass(frozen=True)
class Compiled:
    """The resources of one kernel; `spilled` counts bytes of registers of a thread that had to go to memory."""

    name: str
    shared_bytes: int
    registers: int
    spilled: int


def kernels(dim: int, dtype: str, group: int, splits: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each kernel with the sizes that it is compiled for: heads of `dim`, `group` of them to a key-value head."""
    from worker.kv.torch import paged_kernels
    from worker.kv.torch.paged_kernels import LOG2_E, keys_at_once, padded
    from worker.models.torch.kernels import fused

    wide = padded(dim)
    keys = keys_at_once(dim, TYPES[dtype])
    common = {"CAPPED": True, "SINKS": True, "KV_HEADS": 8, "GROUP": group, "DIM": dim, "PADDED_DIM": wide}
    common |= {"PAGE": 32, "KEYS": keys, "WIDENED": False, "LOG2_E": LOG2_E}
    reduced = {"SINKS": True, "HEADS": 8 * group, "DIM": dim, "PADDED_DIM": wide, "LOG2_E": LOG2_E}
    yield paged_kernels._decode, {**common, "TILE": padded(group), "SPLITS": splits}
    yield paged_kernels._reduce, {**reduced, "SPLITS": splits}
    yield paged_kernels._prefill, {**common, "PADDED_GROUP": group, "TILE": paged_kernels.tile_rows(dim, group)}
    yield paged_kernels._store, {"HEADS": 8, "DIM": dim, "PAGE": 32, "PADDED_HEADS": 8, "PADDED_DIM": wide}
    yield fused._rms_norm, {"DIM": dim * 8, "PADDED_DIM": wide * 8, "ONE_ADDED": False}
    yield fused._gated, {"WIDTH": dim * 9, "BLOCK": 1024, "GELU": True}
    turned = {"HEADS": 8 * group, "PADDED_HEADS": 8 * group, "KV_HEADS": 8, "PADDED_KV_HEADS": 8}
    yield fused._rotary, {**turned, "HALF": dim // 2, "PADDED_HALF": wide // 2}


def compiled(arch: int, dtype: str, dim: int, group: int = 4, splits: int = 8) -> Iterator[Compiled]:
    """Compile everything. Raises what Triton or its assembler raises for a kernel that is wrong."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, sizes in kernels(dim, dtype, group, splits):
        names: list[str] = kernel.arg_names
        signature = {name: _type(name, sizes, dtype) for name in names}
        constants = {(names.index(name),): value for name, value in sizes.items()}
        # As in a launch: addresses and strides of real tensors are multiples of 16, and loads become wide.
        even = {(names.index(name),): [["tt.divisibility", 16]] for name in names if _even(name, signature[name])}
        source = ASTSource(kernel, signature, constants, even)
        binary = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        registers, spilled = _resources(binary.asm["cubin"])
        yield Compiled(kernel.__name__, binary.metadata.shared, registers, spilled)


def _type(name: str, sizes: dict[str, Any], dtype: str) -> str:
    if name in sizes:
        return "constexpr"
    if name in NUMBERS:
        return "fp32"
    if INDEX_ARGUMENTS.search(name):
        return "i32"
    return "*fp32" if name == "partial" else INTEGER_POINTERS.get(name, f"*{dtype}")


def _even(name: str, kind: str) -> bool:
    return (kind.startswith("*") and kind != "*i64") or (kind == "i32" and name not in {"window", "inner"})


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local memory of a thread, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers = re.search(r"REG:(\d+)", usage.stdout)
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    if registers is None or stack is None:
        raise RuntimeError(f"{tool} names no registers: {usage.stdout[:500]}")
    return int(registers[1]), int(stack[1])


@with_options
def main(
    arch: Annotated[int, "Compute capability, without the point."] = 90,
    dtype: Annotated[str, click.Choice(list(TYPES))] = "bf16",
    dim: Annotated[int, "Numbers in a head."] = 128,
) -> None:
    """Compile every kernel for a GPU without having one, and print what it takes of it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise click.ClickException("TRITON_INTERPRET is set, so nothing can be compiled; unset it.")
    click.echo(f"{'kernel':<12} {'shared, bytes':>14} {'registers':>10} {'spilled, bytes':>15}")
    for kernel in compiled(arch, dtype, dim):
        click.echo(f"{kernel.name:<12} {kernel.shared_bytes:>14,} {kernel.registers:>10} {kernel.spilled:>15}")


if __name__ == "__main__":
    main()
