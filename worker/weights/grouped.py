"""Weights of a linear layer as codes with a scale by group of inputs, as a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3, INT8, INT4, E2M1 = "e4m3", "int8", "int4", "e2m1"

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits by their code (OCP Microscaling Formats 1.0)."""
EXPONENT_ZERO = 127
"""The code of the scale 1 among powers of two (E8M0)."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix (outputs, inputs): w[o, i] = scales[o, i // group] · (code[o, i] - zeros[o, i // group]).

    `codes` is uint8 of shape (outputs, bytes of a row): e4m3 numbers of 8 bits (OCP FP8: no infinity), int8 whole
    numbers, or of 4 bits, the first of two in the low half of a byte: int4, unsigned whole numbers, or e2m1 floats.
    `scales` is (outputs, groups) in float32, for e2m1 exponents of two plus 127 in uint8 (E8M0). `zeros` is the same in
    uint8, or None for zero. The last group may be short. A product with an int8 matrix rounds the other factor to 8
    bits too.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.kind in (INT4, E2M1) else 1)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def rows(self, start: int, stop: int) -> Grouped:
        """The outputs [start, stop), views."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return Grouped(self.kind, self.codes[start:stop], self.scales[start:stop], zeros, self.group)

    def values(self) -> Tensor:
        """The codes less their zeros (outputs, inputs), in float32, where each is exact."""
        outputs, inputs = self.shape
        if self.kind == E4M3:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind == INT8:
            return self.codes.view(torch.int8).float()
        halves = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).reshape(outputs, inputs)
        if self.kind == E2M1:
            return torch.tensor(E2M1_VALUES)[halves.long()]
        values = halves.float()
        return values if self.zeros is None else values - self._by_input(self.zeros.float())

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights (outputs, inputs)."""
        scales = self.scales
        if self.kind == E2M1:
            exponents = scales.int() - EXPONENT_ZERO
            scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents)
        return self.values().to(dtype) * self._by_input(scales.to(dtype))

    def _by_input(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


def joined(parts: list[Grouped]) -> Grouped:
    """Parts of one kind and group, one below the other."""
    first = parts[0]
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Grouped(first.kind, codes, scales, zeros, first.group)
