"""Which linear layer holds a model's weights, by what was asked for and what the machine can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from control.errors import CompilerMissing, SettingsError
from control.quantization import BLOCK_QUANTS
from worker.models.layers.dense import DenseLinear, stacked
from worker.models.layers.grouped import GroupedLinear
from worker.models.layers.half import HalfLinear
from worker.models.layers.int8 import Int8Linear
from worker.models.layers.linear import NativeLinear, threads_here
from worker.models.layers.prepacked import PrepackedLinear
from worker.native.build import reason_missing
from worker.native.compiled import compiler_missing
from worker.native.host import INSTALL, INSTEAD, check_host
from worker.native.library import Threads
from worker.selftest.shapes import Shapes
from worker.weights.packed_matrix import Kept
from worker.weights.stored_matrix import StoredMatrix, Weights

Pack = Callable[[list[Any], Tensor | None], nn.Module]
"""(weights of layers that share their input, as stored, each (outputs, inputs); their biases joined) → one layer."""

WORTH_PACKING = 2**19
"""Weights from which on oneDNN's product saves more than its call costs (some 14 µs) beside the plain one."""

PACKED: dict[str, type[HalfLinear | Int8Linear]] = {"f16": HalfLinear, "int8": Int8Linear}


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

    def keeps_stored_rows(self, table: Weights) -> bool:
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
    """How linear layers are kept; stored matrices at their stored width. `kinds`: those that the C++ products
    must have, by native/kinds.py; None: all. `shapes`: those that they are checked with. Raises SettingsError where
    this torch has no kernels for `quant`."""
    native = dtype == torch.float32 and device.type == "cpu"
    plain = _plain_packing(quant, dtype, device, threads_here(kinds, shapes) if native else None)

    def pack(parts: list[Weights], bias: Tensor | None) -> nn.Module:
        if plain.threads is None and any(isinstance(part, StoredMatrix) and not part.in_blocks for part in parts):
            return GroupedLinear(parts, bias, dtype)
        return plain.pack(parts, bias)

    return replace(plain, pack=pack)


def _plain_packing(quant: str | None, dtype: torch.dtype, device: torch.device, threads: Threads | None) -> Packing:
    if threads is not None:

        def native(parts: Sequence[Weights], bias: Tensor | None) -> nn.Module:
            return NativeLinear(parts, bias, [_kept_as(part, quant) for part in parts], threads)

        return Packing(
            native,
            packed=True,
            quantized=quant is not None,
            shares_tables=True,
            rounds_tables=quant == "int8",
            threads=threads,
        )
    if quant in BLOCK_QUANTS:
        check_host(f"--quant {quant}", INSTEAD)
        raise _not_in_cpp(f"--quant {quant} is", INSTEAD)
    if quant is not None:
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise SettingsError(f"--quant {quant} needs an x86 processor with AVX2; leave it out on this host")
        layer = PACKED[quant]
        return Packing(lambda parts, bias: layer(_joined(_tensors(parts)), bias), packed=True, quantized=True)

    def dense(parts: Sequence[Weights], bias: Tensor | None) -> nn.Module:
        return DenseLinear(stacked(_tensors(parts), dtype, device), bias)

    def prepacked(parts: Sequence[Weights], bias: Tensor | None) -> nn.Module:
        worthwhile = sum(part.numel() for part in _tensors(parts)) >= WORTH_PACKING
        return PrepackedLinear(_joined(_tensors(parts)), bias) if worthwhile else dense(parts, bias)

    if dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available():
        return Packing(prepacked, packed=True, quantized=False)
    return Packing(dense, packed=False, quantized=False)


def _not_in_cpp(what: str, remedy: str) -> SettingsError:
    """The error for weights that only C++ computes; CompilerMissing where another start would end alike."""
    reason = reason_missing() or "this model is not served in float32 on a CPU with AVX2"
    missing = bool(reason_missing()) and compiler_missing()
    install = f"{INSTALL} Or: " if missing else ""
    return (CompilerMissing if missing else SettingsError)(
        f"{what} computed in C++ only, but {reason}. {install}{remedy}"
    )


def _kept_as(part: Weights, quant: str | None) -> Kept:
    """Quantized weights and 16 bits of the checkpoint stay what they are: they lose nothing, and float32 would only be
    more to read."""
    if isinstance(part, StoredMatrix):
        return part.kind
    if quant == "int8":
        return torch.int8
    if part.dtype in (torch.float16, torch.bfloat16):
        return part.dtype
    return torch.float32 if quant is None else torch.float16


def _tensors(parts: Sequence[Weights]) -> list[Tensor]:
    """Raises SettingsError where a part is in blocks, which only the C++ products read."""
    tensors: list[Tensor] = []
    for part in parts:
        if isinstance(part, StoredMatrix):
            raise _not_in_cpp(f"weights in {part.kind} are", "Serve them with --dequantize on this host.")
        tensors.append(part)
    return tensors


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
