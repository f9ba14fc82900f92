"""Products in blocks are exact but for activations: in 8 bits; weights that stay in a file's blocks, whatever the
instructions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.worker.models.layers.test_grouped_products import grouped
from worker.models.torch.layers import NativeLinear
from worker.native.host import SOURCE
from worker.native.library import Threads, declare_products, threads_here
from worker.weights.dequantize import dequantize
from worker.weights.formats import BLOCK_FORMATS, MXFP4, BlockFormat
from worker.weights.formats import FORMATS as ALL_FORMATS
from worker.weights.stored_matrix import StoredMatrix

NATIVE = threads_here()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="no C++ compiler, or a processor without AVX2")

FORMATS = list(ALL_FORMATS.values())
HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "tq2_0": (64,), "mxfp4": ()}
"""Where a block's fp16 numbers lie, if not at its begin."""
TWO_AT_FRONT = ("q4_1", "q5_1", "q4_k", "q5_k")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

BUILDS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX2 with VNNI": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "AVX-512 without VNNI": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
}
NEEDED = {"AVX2": "avx2", "AVX2 with VNNI": "avx_vnni", "AVX-512 without VNNI": "avx512bw"}
"""A processor's flag without which a build faults."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in a model's forward."""
    with torch.inference_mode():
        yield


def random_blocks(format: BlockFormat, outputs: int, inputs: int, seed: int = 1) -> StoredMatrix:
    """Any bits for the values, and small scales of either sign."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (outputs, inputs // format.weights, format.bytes), generator=generator).to(torch.uint8)
    for place in HALVES.get(format.name, (0, 2) if format.name in TWO_AT_FRONT else (0,)):
        halves = (torch.rand(data.shape[:2], generator=generator) * 0.02 - 0.005).half()
        data[:, :, place : place + 2] = halves.unsqueeze(2).view(torch.uint8)
    if format is MXFP4:
        data[:, :, 0] = torch.randint(110, 125, data.shape[:2], generator=generator)
    return StoredMatrix(format.name, data.flatten(1).numpy())


def numbers(blocks: StoredMatrix) -> Tensor:
    """The weights in float32: those functions are tested against ggml's own results."""
    if blocks.format is not MXFP4:
        return torch.from_numpy(dequantize(blocks))
    data = torch.from_numpy(blocks.codes).view(blocks.codes.shape[0], -1, 17)
    values = E2M1[torch.cat([data[:, :, 1:] & 15, data[:, :, 1:] >> 4], dim=2).int()]
    return (values * torch.exp2(data[:, :, :1].float() - 127)).flatten(1)


def native(*parts: StoredMatrix, bias: Tensor | None = None, threads: Threads | None = NATIVE) -> NativeLinear:
    assert threads is not None
    return NativeLinear(parts, bias, [part.kind for part in parts], threads)


def rows(count: int, inputs: int, seed: int = 2) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed))


def width(format: BlockFormat, blocks: int) -> int:
    return format.weights * blocks


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_near_the_exact_product(format: BlockFormat) -> None:
    """The product is that of the dequantised weights but for the rounding of activations to 8 bits, for one row and
    many, for widths that 256 does not divide, and where the last panel is not full."""
    for outputs, blocks in ((64, 1), (131, 3), (33, 13)):
        weights, inputs = random_blocks(format, outputs, width(format, blocks)), width(format, blocks)
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3))
        for count in (1, 2, 9, 150):
            x = rows(count, inputs)
            exact = x.double() @ numbers(weights).double().T
            assert error(native(weights)(x), exact) < 0.012
            assert error(native(weights, bias=bias)(x), exact + bias) < 0.012


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_rounded_activations_give_the_exact_product(format: BlockFormat) -> None:
    """Activations that eight bits hold exactly lose nothing: only float32's rounding is left. A wrong offset, minimum
    or scale would show here."""
    weights = random_blocks(format, 40, width(format, 3))
    x = torch.randint(-127, 128, (9, width(format, 3)), generator=torch.Generator().manual_seed(4)).float()
    x[:, ::32] = 127
    exact = x.double() @ numbers(weights).double().T
    assert error(native(weights)(x), exact) < 1e-5


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_a_row_is_the_same_in_any_company(format: BlockFormat) -> None:
    """Alone, among others, beside an outlier and beside NaN, and with any number of threads, a row's result has the
    same bits; NaN and infinity come out in their own row only."""
    weights = random_blocks(format, 131, width(format, 3))
    linear, x = native(weights), rows(300, width(format, 3))
    alone = torch.cat([linear(x[index : index + 1]) for index in range(300)])
    assert torch.equal(linear(x), alone)
    x[7] *= 1000
    x[9, 40], x[11, 41], x[13, 42] = float("nan"), float("inf"), -float("inf")
    indices = [index for index in range(300) if index not in (7, 9, 11, 13)]
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        try:
            found = native(weights, threads=threads_here())(x)
        finally:
            torch.set_num_threads(1)
        assert torch.equal(found[indices], alone[indices])
        assert not found[[9, 11, 13]].isfinite().any()


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_an_outlier_costs_its_own_block_only(format: BlockFormat) -> None:
    """One activation a thousand times as large blurs no more than the 32 inputs around it. The control: with one scale
    for the row the others would be lost."""
    weights, inputs = random_blocks(format, 64, 2 * 256), 2 * 256
    dense = numbers(weights).double()
    x = rows(1, inputs)
    x[0, 5] = 1000.0
    others = x.clone()
    others[0, :32] = 0
    around = x - others
    blurred = native(weights)(x).double() - around.double() @ dense.T
    exact = others.double() @ dense.T
    bound = 1000 / 254 * dense[:, :32].abs().sum(1)
    assert ((blurred - exact).abs() <= bound + 0.05 * exact.abs().max()).all()
    assert error(native(weights)(others), exact) < 0.012
    one_scale = (x * 127 / 1000).round() * 1000 / 127
    assert error((one_scale - around).double() @ dense.T, exact) > 0.5


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_zeros_and_no_rows(format: BlockFormat) -> None:
    """Rows of zeros give the bias, an empty batch an empty result, and blocks whose bytes are zero are rows of zeros
    wherever a scale can be zero."""
    weights, bias = random_blocks(format, 40, width(format, 2)), torch.randn(40)
    linear = native(weights, bias=bias)
    assert torch.equal(linear(torch.zeros(2, width(format, 2))), bias.expand(2, 40))
    assert linear(torch.zeros(0, width(format, 2))).shape == (0, 40)
    assert weights.padded(40) is weights  # a copy of a vocabulary would be seen in the peak of a load
    padded = native(weights.padded(70))(rows(3, width(format, 2)))
    assert (padded[:, 40:] == 0).all() or format is MXFP4


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_rows_are_looked_up_to_the_last_bit(format: BlockFormat) -> None:
    """An embedding that shares the packed head gets the bits of ggml's own dequantisation, without a second copy."""
    weights = random_blocks(format, 131, width(format, 3))
    linear, ids = native(weights), torch.tensor([[0, 130], [31, 32]])
    assert torch.equal(linear.look_up(ids), numbers(weights)[ids])
    panels = -(-131 // linear.threads.library.furrow_panel()) * linear.threads.library.furrow_panel() / 131
    widened = 138 / 110 if format.name == "iq3_s" else 1.04  # its indices of a grid become 4 bits by weight
    assert linear.packed_bytes <= widened * panels * weights.codes.nbytes


def test_one_product_mixes_formats() -> None:
    """Query, key and value as a Q4_K_M file stores them, beside 16 bits, with borders inside of panels: each part has
    the bits that it has alone, and a fourth kind is refused."""
    q4, q6 = (random_blocks(BLOCK_FORMATS[name], count, 512) for name, count in (("q4_k", 70), ("q6_k", 13)))
    half = torch.randn(40, 512).bfloat16()
    bias, x = torch.randn(123), rows(20, 512)
    assert NATIVE is not None
    mixed = NativeLinear([q4, q6, half], bias, [q4.kind, q6.kind, "bfloat16"], NATIVE)
    alone = [
        native(q4, bias=bias[:70])(x),
        native(q6, bias=bias[70:83])(x),
        NativeLinear([half], bias[83:], ["bfloat16"], NATIVE)(x),
    ]
    assert torch.equal(mixed(x), torch.cat(alone, dim=1))
    joined = native(q4, random_blocks(q4.format, 9, 512, seed=5))
    assert torch.equal(joined(x)[:, :70], native(q4)(x))
    with pytest.raises(ValueError, match="5 kinds of weights in one product; 4 fit"):
        NativeLinear([q4, q6, half, q6, q4], None, [q4.kind, q6.kind, "bfloat16", q6.kind, q4.kind], NATIVE)


def test_a_share_of_the_inputs_is_a_view() -> None:
    """A rank's columns are packed from the file's rows; a border inside a block is refused."""
    weights = random_blocks(BLOCK_FORMATS["q4_k"], 40, 1024)
    x = rows(3, 512)
    exact = x.double() @ numbers(weights)[:, 512:].double().T
    assert error(native(weights.columns(512, 1024))(x), exact) < 0.012
    with pytest.raises(ValueError, match="cut a block of 256 weights"):
        weights.columns(0, 288)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.parametrize("build", list(BUILDS))
def test_other_instructions_give_the_same_bits(build: str, tmp_path: Path) -> None:
    """The products compiled for other vectors give the bits of this processor's: the order of sums is by output."""
    if NEEDED[build] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {NEEDED[build]}")
    built = tmp_path / "products.so"
    # Another namespace: the loader would take the tables of the library that is already there.
    own = ("-DFURROW_PRODUCTS_ONLY", f"-Dfurrow=build_{list(BUILDS).index(build)}")
    flags = ("-std=c++17", "-O0", "-shared", "-fPIC", *own, *BUILDS[build])
    subprocess.run(["c++", *flags, "-o", str(built), str(SOURCE)], check=True, timeout=200)
    loaded = ctypes.CDLL(str(built))
    declare_products(loaded)
    other = Threads(loaded, torch.get_num_threads())
    for format in FORMATS:
        weights = random_blocks(format, 75, width(format, 3))
        x = torch.cat([rows(11, width(format, 3)), torch.full((1, width(format, 3)), -3.0)])
        expected = native(weights)(x)
        for count in (1, 2, 3, 5, 12):  # tiles of rows, whole and not, that differ by build
            theirs = native(weights, threads=other)(x[:count])
            assert torch.equal(theirs, expected[:count]), f"{format.name}, {count} rows"
        ids = torch.arange(75)
        assert torch.equal(native(weights, threads=other).look_up(ids), numbers(weights)), format.name
    for kind in ("e4m3", "int4", "e2m1", "int8"):
        part, x = grouped(kind, 75, 256, 32), rows(11, 256)
        theirs, mine = (NativeLinear([part], None, [kind], one)(x) for one in (other, threads_here()) if one)
        assert torch.equal(theirs, mine), kind
