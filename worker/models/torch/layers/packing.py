"""Which linear layer holds a model's weights, by what was asked for and what the machine can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from control.errors import CompilerMissing, SettingsError
from worker.models.native.linear import kept_as
from worker.models.torch.layers.dense import DenseLinear, stacked
from worker.models.torch.layers.linear import NativeLinear
from worker.native.compiled import compiler_missing
from worker.native.host import INSTALL, INSTEAD
from worker.native.library import Threads, reason_missing, threads_here
from worker.selftest.shapes import Shapes
from worker.tensors import as_tensor, number_type
from worker.weights.stored_matrix import StoredMatrix

Matrix = Tensor | StoredMatrix
"""A matrix (outputs, inputs) as stored: plain numbers, or quantized ones."""

Pack = Callable[[list[Any], Tensor | None], nn.Module]
"""(weights of layers that share their input, as stored, each (outputs, inputs); their biases joined) → one layer."""


@dataclass(frozen=True)
class Packing:
    """How a model's linear layers are kept: made by `pack`, in an order of their own where `packed`."""

    pack: Pack
    packed: bool
    quantized: bool
    shares_tables: bool = False
    """True if an embedding can be looked up in the head that `pack` made of the same table."""
    rounds_tables: bool = False
    """True if such a look-up gives rows in 8 bits. Families that scale their embedding have the table apart: its
    rounding would be scaled too."""

    threads: Threads | None = None
    """Those of the C++ products; None where torch computes the layers."""

    def keeps_stored_rows(self, table: Matrix) -> bool:
        """True if an embedding stays apart from the head, in the 16 bits in which it is stored. A packed head allows no
        look-up; a float32 table beside it would double the memory."""
        if isinstance(table, StoredMatrix):
            return False
        return self.quantized or (self.packed and table.dtype in (torch.float16, torch.bfloat16))


def packing(
    quant: str | None,
    dtype: torch.dtype,
    device: torch.device,
    kinds: Iterable[str] | None = None,
    shapes: Shapes | None = None,
) -> Packing:
    """How linear layers are kept: packed in float32 on a CPU that runs the C++ products, else dense in `dtype`.
    `kinds`: those that the C++ products must have, by native/library.py; None: all. `shapes`: those that they are
    checked with. Raises SettingsError for a `quant` where there are no C++ products."""
    native = dtype == torch.float32 and device.type == "cpu"
    threads = threads_here(kinds, shapes) if native else None
    if threads is None:
        if quant is not None:
            raise _not_in_cpp(f"--quant {quant} is", INSTEAD)
        return Packing(partial(_dense, dtype, device), packed=False, quantized=False)

    def pack(parts: Sequence[Matrix], bias: Tensor | None) -> nn.Module:
        return NativeLinear(parts, bias, [kept_as(part, quant) for part in parts], threads)

    return Packing(
        pack,
        packed=True,
        quantized=quant is not None,
        shares_tables=True,
        rounds_tables=quant == "int8",
        threads=threads,
    )


def _dense(dtype: torch.dtype, device: torch.device, parts: Sequence[Matrix], bias: Tensor | None) -> nn.Module:
    """Raises SettingsError for weights in blocks, which only the C++ products read."""
    plain: list[Tensor] = []
    for part in parts:
        if isinstance(part, StoredMatrix) and part.in_blocks:
            raise _not_in_cpp(f"weights in {part.kind} are", "Serve them with --dequantize on this host.")
        plain.append(as_tensor(part.dequantized(number_type(dtype))) if isinstance(part, StoredMatrix) else part)
    return DenseLinear(stacked(plain, dtype, device), None if bias is None else bias.to(device, dtype))


def _not_in_cpp(what: str, remedy: str) -> SettingsError:
    """The error for weights that only C++ computes; CompilerMissing where another start would end alike."""
    reason = reason_missing() or "this model is not served in float32 on a CPU with AVX2"
    missing = bool(reason_missing()) and compiler_missing()
    install = f"{INSTALL} Or: " if missing else ""
    return (CompilerMissing if missing else SettingsError)(
        f"{what} computed in C++ only, but {reason}. {install}{remedy}"
    )
