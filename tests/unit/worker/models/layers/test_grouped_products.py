"""Products of codes with scales by group: the formula, for any shape, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from worker.models.torch.layers import NativeLinear
from worker.native.library import threads_here
from worker.weights.schemes import E2M1, E4M3, INT4, INT8
from worker.weights.stored_matrix import StoredMatrix

THREADS = threads_here()
pytestmark = pytest.mark.skipif(THREADS is None, reason="no C++ compiler, or a processor without AVX2")

SHAPES = [(33, 96, 32), (131, 64, 64), (70, 256, 128), (5, 40, 40)]
"""Outputs, inputs and inputs of a group."""


def grouped(kind: str, outputs: int, inputs: int, group: int) -> StoredMatrix:
    """Random codes, each but NaN among them."""
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(
        0, 256, (outputs, inputs // (2 if kind in (INT4, E2M1) else 1)), dtype=torch.uint8, generator=generator
    )
    if kind == E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0x07
    shape = outputs, 1 if kind == INT8 else -(-inputs // group)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if kind == INT4 else None
    if kind == E2M1:
        scales = torch.randint(100, 135, shape, dtype=torch.uint8, generator=generator)
        return StoredMatrix(kind, codes.numpy(), scales.numpy(), None, group)
    return StoredMatrix(
        kind,
        codes.numpy(),
        (torch.rand(shape, generator=generator) / 100).numpy(),
        None if zeros is None else zeros.numpy(),
        inputs if kind == INT8 else group,
    )


def rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


def layer_of(part: StoredMatrix, bias: torch.Tensor | None) -> NativeLinear:
    assert THREADS is not None
    return NativeLinear([part], bias, [part.kind], THREADS)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, shape) for kind in (E4M3, INT4, E2M1) for shape in SHAPES), (E4M3, (20, 90, 64))],
    ids=str,
)
def test_products_are_those_of_the_formula(kind: str, shape: tuple[int, int, int]) -> None:
    """Within 1e-5 of the product in float64, a short last group of 8-bit floats included."""
    outputs, inputs, _ = shape
    part, bias = grouped(kind, *shape), torch.randn(outputs)
    for count in (1, 2, 9, 70):
        x = rows(count, inputs)
        exact = functional.linear(x.double(), torch.from_numpy(part.dequantized(np.float64)), bias.double())
        assert (layer_of(part, bias)(x) - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("shape", [*SHAPES, (20, 90, 90)], ids=str)
def test_two_factors_of_eight_bits(shape: tuple[int, int, int]) -> None:
    """Activations become ± 127 of their row's largest; the sums are exact. -128 among the weights is itself."""
    part, bias = grouped(INT8, *shape), torch.randn(shape[0])
    assert (part.values() == -128).any()
    x = rows(9, shape[1])
    values, scales = torch.from_numpy(part.values()), torch.from_numpy(part.scales)
    levels = (x / x.abs().amax(1, keepdim=True) * 127).round().double()
    exact = levels @ values.double().T * scales.double().T * (x.abs().amax(1, keepdim=True).double() / 127)
    plain = functional.linear(x.double(), torch.from_numpy(part.dequantized(np.float64)))
    found = layer_of(part, bias)(x) - bias
    assert (found - exact).norm() / exact.norm() < 1e-5
    assert 1e-4 < (found - plain).norm() / plain.norm() < 0.02


@pytest.mark.parametrize("kind", [E4M3, INT4, E2M1, INT8])
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    """Alone, among others, beside plain matrices in one product, and beside NaN, which stays in its row."""
    assert THREADS is not None
    part, more = grouped(kind, 70, 256, 128), torch.randn(40, 256)
    layer = NativeLinear([part, more, part.rows(0, 33)], None, [kind, "float32", kind], THREADS)
    x = rows(19, 256)
    together = layer(x)
    assert all(torch.equal(together[row], layer(x[row : row + 1])[0]) for row in range(len(x)))
    assert torch.equal(together[:, :33], together[:, 110:])
    x[3, 5] = float("nan")
    spoilt = layer(x)
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[4:], together[4:])


def test_weights_keep_their_width() -> None:
    """Four bits, or eight, and the scales."""
    for kind, bits in ((INT4, 4), (E4M3, 8), (E2M1, 4), (INT8, 8)):
        part = grouped(kind, 256, 1024, 128)
        assert layer_of(part, torch.zeros(256)).packed_bytes < (bits / 8 * 1.1) * 256 * 1024


def test_zeros_and_nan_in_eight_bits() -> None:
    """A row of zeros gives the bias, and NaN stays in its row."""
    part, bias = grouped(INT8, *SHAPES[0]), torch.randn(SHAPES[0][0])
    x = rows(3, SHAPES[0][1])
    third = layer_of(part, bias)(x)[2]
    x[0], x[1, 7] = 0, float("nan")
    found = layer_of(part, bias)(x)
    assert torch.equal(found[0], bias)
    assert found[1].isnan().all()
    assert torch.equal(found[2], third)
