"""Blocks are as near as llama.cpp's quantisers make them: float weights on any tensor, with any number of threads."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from control.errors import ModelFilesError
from worker.native.library import Threads, threads_here
from worker.tensors import as_array
from worker.weights.dequantize import dequantize
from worker.weights.formats import BLOCK_FORMATS, BlockFormat
from worker.weights.quantizer import quantize
from worker.weights.stored_matrix import StoredMatrix

pytestmark = pytest.mark.skipif(threads_here() is None, reason="no compiler")

LLAMA_CPP = {
    "q4_0": 0.00346664,
    "q4_1": 0.00276169,
    "q5_0": 0.00179045,
    "q5_1": 0.00135145,
    "q8_0": 0.00022693,
    "q2_k": 0.00947906,
    "q3_k": 0.00520167,
    "q4_k": 0.00255347,
    "q5_k": 0.00129076,
    "q6_k": 0.00070489,
}
"""Errors of llama.cpp's quantisers on `heavy_tailed()`: the root of the mean square. To compute them anew:

    python -c 'from tests.unit.worker.native.test_quantize import print_errors_of_llama_cpp as show; show()'
"""

BOUND = 1.02
"""Of the root mean square error, times that of llama.cpp."""


def heavy_tailed() -> Tensor:
    """(32, 512): half of it gaussian, half from Student's t with three degrees of freedom."""
    generator = np.random.default_rng(14)
    both = [generator.standard_normal((16, 512)), generator.standard_t(3, (16, 512))]
    return torch.from_numpy(0.02 * np.concatenate(both)).float()


def tensors() -> dict[str, Tensor]:
    generator = np.random.default_rng(15)
    normal = generator.standard_normal((32, 512))
    made: dict[str, Any] = {
        "gaussian": normal * 0.02,
        "student t": generator.standard_t(3, normal.shape) * 0.02,
        "extreme tails": np.clip(generator.standard_t(1.5, normal.shape) * 0.02, -50, 50),
        "uniform": generator.uniform(-0.05, 0.05, normal.shape),
        "positive": np.abs(normal) * 0.02 + 0.01,
        "shifted": normal * 0.02 + 0.3,
        "constant rows": np.broadcast_to(normal[:, :1], normal.shape) * 0.1,
        "zero": np.zeros_like(normal),
        "sparse": normal * (generator.random(normal.shape) < 0.05),
        "nearly empty": normal * (generator.random(normal.shape) < 0.003),
        "signs": np.sign(normal) * 0.05,
        "tiny": normal * 1e-5,
        "below float16": normal * 1e-7,
        "vanishing": normal * 1e-20,
        "large": normal * 1e3,
        "huge": normal * 1e6,
        "beyond float16": normal * 1e20,
        "rows of all magnitudes": normal * 10.0 ** generator.uniform(-6, 3, (32, 1)),
        "outlier columns": normal * np.where(generator.random((1, 512)) < 0.01, 0.4, 0.02),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(values)).float() for name, values in made.items()}


def error(weights: Tensor, restored: Tensor) -> float:
    """Root of the mean square."""
    return float((restored.double() - weights.double()).square().mean().sqrt())


def restored(blocks: StoredMatrix) -> Tensor:
    return torch.from_numpy(dequantize(blocks))


def by_llama_cpp(weights: Tensor, format: BlockFormat) -> StoredMatrix:
    """Quantised by the package libgguf, which compiles llama.cpp's own functions."""
    rows = importlib.import_module("libgguf").quantize_rows(weights.numpy(), format.ggml_type)
    return StoredMatrix(format.name, rows.reshape(weights.shape[0], -1))


def print_errors_of_llama_cpp() -> None:
    for name, format in BLOCK_FORMATS.items():
        print(f'    "{name}": {error(heavy_tailed(), restored(by_llama_cpp(heavy_tailed(), format))):.8f},')


@pytest.fixture(scope="module")
def threads() -> Threads:
    made = threads_here()
    assert made is not None
    return made


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_errors_are_those_of_llama_cpp_or_smaller(name: str, threads: Threads) -> None:
    """On a seeded tensor. The control has all scales a little too large."""
    weights = heavy_tailed()
    blocks = StoredMatrix(name, quantize(weights.numpy(), BLOCK_FORMATS[name], threads))
    found = error(weights, restored(blocks))
    assert 0.5 * LLAMA_CPP[name] < found <= BOUND * LLAMA_CPP[name]
    assert error(weights, 1.2 * restored(blocks)) > BOUND * LLAMA_CPP[name]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_any_tensor_is_as_near_as_by_llama_cpp(name: str, threads: Threads) -> None:
    """Where llama.cpp's scales overflow, they are finite here."""
    pytest.importorskip("libgguf", reason="libgguf is not installed")
    format = BLOCK_FORMATS[name]
    for kind, weights in tensors().items():
        found = error(weights, restored(StoredMatrix(format.name, quantize(weights.numpy(), format, threads))))
        theirs = error(weights, restored(by_llama_cpp(weights, format)))
        assert np.isfinite(found), kind
        assert not np.isfinite(theirs) or found <= BOUND * theirs, kind


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_libgguf_reads_the_blocks(name: str, threads: Threads) -> None:
    libgguf = pytest.importorskip("libgguf", reason="libgguf is not installed")
    blocks = StoredMatrix(name, quantize(heavy_tailed().numpy(), BLOCK_FORMATS[name], threads))
    theirs = libgguf.dequantize_rows(blocks.codes, blocks.format.ggml_type, 512)
    assert torch.equal(torch.from_numpy(theirs).view(32, 512), restored(blocks))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_bytes_do_not_depend_on_threads_or_neighbours(
    name: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows by three threads give what each row alone gives, and bfloat16 what its float32 gives."""
    weights, format = heavy_tailed().bfloat16(), BLOCK_FORMATS[name]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    whole = quantize(as_array(weights), format, Threads(threads.library, torch.get_num_threads()))
    alone = [quantize(row.float().unsqueeze(0).numpy(), format, threads) for row in weights]
    assert np.array_equal(whole, np.concatenate(alone))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float, threads: Threads) -> None:
    weights = torch.zeros(2000, 256)
    weights[1500, 17] = value
    with pytest.raises(ModelFilesError, match=r"model\.x\.weight has NaN or infinity in row 1500"):
        quantize(weights.numpy(), BLOCK_FORMATS["q4_k"], threads, "model.x.weight")


def test_blocks_must_divide_the_inputs(threads: Threads) -> None:
    with pytest.raises(ValueError, match="288 inputs are no multiple of 256"):
        quantize(np.zeros((4, 288), np.float32), BLOCK_FORMATS["q6_k"], threads)
