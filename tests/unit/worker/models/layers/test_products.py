"""Packed linear layers are near, row by row: how near they are, and that a row's result is its own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from control.errors import SettingsError
from tests.exact_int8 import ExactInt8Linear
from worker.models.torch.layers import NativeLinear, packing
from worker.native.library import threads_here

Make = Callable[[Tensor, Tensor | None], nn.Module]

THREADS = threads_here()
pytestmark = pytest.mark.skipif(THREADS is None, reason="no C++ compiler, or a processor without AVX2")


def native(kind: str) -> Make:
    return lambda weight, bias: NativeLinear([weight], bias, [kind], THREADS)


MAKES: dict[str, tuple[Make, float]] = {
    "float32": (native("float32"), 1e-5),
    "bfloat16": (native("bfloat16"), 4e-3),
    "f16": (native("float16"), 5e-4),
    "int8": (native("int8"), 0.02),
}
SHAPES = [(64, 64), (131, 64), (64, 90), (33, 17), (256, 1024)]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in a model's forward."""
    with torch.inference_mode():
        yield


def weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    return torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)


def rows(count: int, inputs: int) -> Tensor:
    return torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(MAKES))
def test_near_the_exact_product(kind: str, shape: tuple[int, int]) -> None:
    """Weights of 32, 16 and 8 bits give the product and bias to their own precision, for one row and for many."""
    make, tolerance = MAKES[kind]
    weight, bias = weights(*shape)
    for count in (1, 2, 9, 70):
        inputs = rows(count, shape[1])
        for given in (bias, None):
            exact = functional.linear(inputs, weight, given)
            error = (make(weight, given)(inputs) - exact).norm() / exact.norm()
            assert error < tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", list(MAKES))
def test_a_row_is_the_same_in_any_company(kind: str, shape: tuple[int, int]) -> None:
    """Alone, among others and beside an outlier a thousand times as large, a row's result has the same bits."""
    linear = MAKES[kind][0](*weights(*shape))
    inputs = rows(19, shape[1])
    alone = torch.cat([linear(inputs[:, index : index + 1]) for index in range(19)], dim=1)
    assert torch.equal(linear(inputs), alone)
    for count in (2, 7, 14):
        assert torch.equal(linear(inputs[:, :count]), alone[:, :count])
    inputs[:, 7] *= 1000
    beside = linear(inputs)
    indices = [index for index in range(19) if index != 7]
    assert torch.equal(beside[:, indices], alone[:, indices])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", list(MAKES))
def test_a_row_gone_bad_is_seen_and_stays_alone(kind: str, bad: float) -> None:
    """NaN and infinity come out as such in their own row, so that its health check sees them, and in no other."""
    linear = MAKES[kind][0](*weights(64, 64))
    inputs = rows(5, 64)
    expected = linear(inputs)
    inputs[0, 2, 11] = bad
    found = linear(inputs)
    assert not found[0, 2].isfinite().any()
    for index in (0, 1, 3, 4):
        assert torch.equal(found[0, index], expected[0, index])


def test_the_largest_sums_do_not_overflow() -> None:
    """With every weight and activation at its largest the sums are still right."""
    for sign in (1.0, -1.0):
        inputs, weight = torch.full((3, 512), 2.0), torch.full((32, 512), sign * 0.5)
        found = MAKES["int8"][0](weight, None)(inputs)
        assert torch.allclose(found, torch.full((3, 32), sign * 512.0), rtol=1e-4)


@pytest.mark.parametrize("kind", list(MAKES))
def test_rows_of_zeros_and_no_rows(kind: str) -> None:
    """A row of zeros gives the bias, and an empty batch an empty result."""
    make, _ = MAKES[kind]
    weight, bias = weights(64, 64)
    linear = make(weight, bias)
    assert torch.equal(linear(torch.zeros(1, 1, 64))[0, 0], bias)
    assert linear(torch.zeros(1, 0, 64)).shape == (1, 0, 64)


def test_large_weights_saturate() -> None:
    """A value beyond float16 becomes its largest value, and never infinity."""
    assert MAKES["f16"][0](torch.full((16, 16), 1e6), None)(torch.ones(1, 16)).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_summed_to_the_same_bits(shape: tuple[int, int]) -> None:
    """Products of 8 bits are the exact ones, but for the last rounding."""
    weight, _ = weights(*shape)
    inputs = rows(19, shape[1])
    ours, exact = MAKES["int8"][0](weight, None)(inputs), ExactInt8Linear(weight, None)(inputs)
    assert torch.allclose(ours, exact, rtol=1e-6, atol=1e-6)


def test_parts_are_rows_of_one_layer() -> None:
    """Layers that were packed together give what each gives alone, wherever in a panel they begin."""
    parts = [weights(outputs, 48)[0] for outputs in (70, 13, 40)]
    inputs = rows(3, 48)
    for kind in ("float32", "int8"):
        alone = [NativeLinear([part], None, [kind], THREADS)(inputs) for part in parts]
        assert torch.equal(NativeLinear(parts, None, [kind] * 3, THREADS)(inputs), torch.cat(alone, dim=-1))


def test_parts_of_several_kinds_are_one_product() -> None:
    """Parts that are kept in different types give, with a bias, what each gives alone."""
    outputs = (70, 13, 40)
    parts, kinds = [weights(count, 48)[0] for count in outputs], ["int8", "bfloat16", "int8"]
    bias, inputs = weights(sum(outputs), 1)[1], rows(9, 48)
    alone = [
        NativeLinear([part], some, [kind], THREADS)(inputs)
        for part, some, kind in zip(parts, bias.split(outputs), kinds, strict=True)
    ]
    assert torch.equal(NativeLinear(parts, bias, kinds, THREADS)(inputs), torch.cat(alone, dim=-1))
    with pytest.raises(ValueError, match="5 kinds of weights in one product; 4 fit"):
        NativeLinear([*parts, *parts[:2]], None, [*kinds, "float32", "bfloat16"], THREADS)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_an_embedding_reads_the_packed_rows(kind: str) -> None:
    """A row that is looked up in a packed head is the weight, to the last bit that is kept."""
    weight, _ = weights(131, 48)
    ids = torch.tensor([[0, 130], [31, 32]])
    rounded = weight.to(getattr(torch, kind)).float()
    assert torch.equal(NativeLinear([weight], None, [kind], THREADS).look_up(ids), rounded[ids])


def test_an_embedding_reads_rows_in_8_bits() -> None:
    """A row that is looked up in an int8 head differs from the weight by half a step of 127 at most."""
    weight, _ = weights(131, 50)
    ids = torch.tensor([[0, 130], [31, 32]])
    found = NativeLinear([weight], None, ["int8"], THREADS).look_up(ids)
    step = weight[ids].abs().amax(-1, keepdim=True) / 127
    assert ((found - weight[ids]).abs() <= 0.501 * step).all()
    assert not torch.equal(found, weight[ids])


@pytest.mark.parametrize("quant", ["int8", "f16", "q4k"])
def test_packing_without_kernels(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ products an option is refused with a remedy."""
    monkeypatch.setenv("FURROW_NATIVE", "0")
    with pytest.raises(
        SettingsError, match=rf"--quant {quant} is computed in C\+\+ only, but FURROW_NATIVE is 0. Leave"
    ):
        packing(quant, torch.float32, torch.device("cpu"))
